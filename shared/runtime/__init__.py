"""Startup of every process of a run, and what keeps it observable and lets it end in order."""
