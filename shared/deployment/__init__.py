"""Acting with a trained policy, without Ray, Redis or a store."""
