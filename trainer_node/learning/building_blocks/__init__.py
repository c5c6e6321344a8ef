"""What algorithms are built of: advantage estimates, batches, gradient steps, critics."""
