"""Checks of level "full": gradients, updates, indices and unnamed rows of a run."""
