"""Checks of training graphs against their manifest."""
