"""Checks of level "run": sessions, outputs, other sizes, empty batches, cost."""
