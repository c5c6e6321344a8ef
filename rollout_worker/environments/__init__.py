"""Environments: how they are made, seeded, stepped N at a time, and tried out."""
