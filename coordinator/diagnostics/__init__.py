"""What is tried before a run: environment, services, machine, and what is open to strangers."""
