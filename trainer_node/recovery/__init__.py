"""One incarnation of the trainer, from its start out of a checkpoint and the log to each way in which it ends."""
