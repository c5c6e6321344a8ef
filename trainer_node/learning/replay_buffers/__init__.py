"""Replay memories: what off-policy algorithms draw from. Columns in NumPy, whole fragments in a ring."""
