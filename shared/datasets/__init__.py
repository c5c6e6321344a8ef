"""Recorded experience from files, in one form: a module for each format, and `reading.read_dataset` for all of them."""
