"""A run from its preparation to its end: what is checked, what is written first, who supervises it, and where."""
