"""Learning algorithms: tensors and config only."""
