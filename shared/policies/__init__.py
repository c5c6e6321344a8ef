"""Policies: torch modules built from the config and the spaces, the same classes wherever a policy acts or learns."""
