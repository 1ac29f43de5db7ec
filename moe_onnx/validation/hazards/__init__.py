"""Checks of what is legal, and wrong or dear all the same; of what exporters lose."""
