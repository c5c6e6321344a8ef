"""Exploration: choosing actions from a policy's outputs, drawn, greedy, random or with noise."""
