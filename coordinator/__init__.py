"""Starts, watches, scales and ends a run; the command line and the Python interface."""
