"""Checks of the file: external data, versions, structure, tensors."""
