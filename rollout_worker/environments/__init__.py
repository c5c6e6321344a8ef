"""Environments: their creation, seeding, stepped N at a time, and tried out."""
