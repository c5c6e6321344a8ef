"""What every process of a run starts from, and what keeps it observable and lets it end in order."""
