"""Checks by the source documents: limits, indices, modes, and the devices that are asked for."""
