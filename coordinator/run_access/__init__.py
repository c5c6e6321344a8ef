"""Runs as handles: a list of them, one, and comparisons."""
