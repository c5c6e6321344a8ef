"""What there is of runs and checkpoints, and what people do with them."""
