"""Learning: tensors, arrays and config. No Redis, store, Ray or clock is reached from here."""
