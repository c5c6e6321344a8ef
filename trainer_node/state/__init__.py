"""The state of a trainer at one policy version: its snapshots, and its place in the log."""
