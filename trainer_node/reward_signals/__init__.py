"""Reward signals beside the environment's: signals.py holds those of a run, the other modules are one signal each."""
