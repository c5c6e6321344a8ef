"""Checkpoints: what they hold, who writes them and when, which are kept, and how a trainer recovers from them."""
