"""What all commands share: their common options, the console, and the live view of a run."""
