"""The configuration of the environment: the environment itself, levels over it, and parameters drawn for episodes."""
