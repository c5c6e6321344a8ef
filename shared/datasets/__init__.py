"""Recorded experience from files and archives, in one form."""
