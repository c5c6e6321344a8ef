"""The trainer: reads the experience log, learns, publishes policy versions and checkpoints."""
