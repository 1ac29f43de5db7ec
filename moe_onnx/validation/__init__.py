"""Checks of models and of tensors, and their reports."""
