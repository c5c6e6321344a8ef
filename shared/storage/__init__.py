"""Contents of the store: objects, checkpoints, the archived log, exports."""
