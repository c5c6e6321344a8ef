"""The config of a run: its sections, how it is read, what may stand together."""
