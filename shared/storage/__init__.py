"""What the store holds: objects, checkpoints, the archived log, exports."""
