"""Reward signals beside the environment's: reward_signals.py holds those of a run; rnd, icm and gail are one each."""
