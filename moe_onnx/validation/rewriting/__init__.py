"""Rewrites of files, proved by running: what was before against what is after."""
