"""Life of a run: validation, preparation, launch and supervision, here or on a cluster."""
