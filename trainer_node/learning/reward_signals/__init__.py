"""Reward signals in addition to the environment's: rnd, icm and gail."""
