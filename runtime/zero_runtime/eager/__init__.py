"""Partitioned parameters for code that is not compiled."""
