"""Trials before a run: environment, services, machine, and access by strangers."""
