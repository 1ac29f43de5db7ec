"""Checks of operators, of the types between them, and of local functions."""
