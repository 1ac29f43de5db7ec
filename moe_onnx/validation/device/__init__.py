"""Tensors of a device: cases for it, and comparison of what it gave."""
