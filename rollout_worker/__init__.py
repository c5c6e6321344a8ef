"""Rollout workers and the evaluator: environments, acting, fragments."""
