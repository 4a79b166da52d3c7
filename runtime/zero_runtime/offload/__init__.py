"""Tensors that live on the host or in swap files, and their way to the device and back."""
