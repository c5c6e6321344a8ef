"""Catalog of runs and checkpoints, and operations on them."""
