"""Parts of algorithms: advantage estimates, batches, gradient steps, critics."""
