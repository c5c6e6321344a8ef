"""Trying an environment before a run learns in it."""
