"""Optimizers' steps on shards, on the device or offloaded, and the state they save."""
