"""Parts shared by all commands: common options, the console, and the live view of a run."""
