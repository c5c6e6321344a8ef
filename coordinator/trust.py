"""Configs that come from elsewhere: code that they name is run only where a person says so.

A run of another machine is known here by the config that its store holds, and an exported checkpoint brings its own.
Whoever could write there could name any function of any module as the environment.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shared.config import Config
from shared.errors import UserError


def named_code(config: Config) -> dict[str, str]:
    """Config field → `module:name`, for all that a config has imported; ids of Gymnasium's own are not among them."""
    found = {field: str(path) for field, path in _paths(config.model_dump(mode="json")) if path}
    return {field: path for field, path in found.items() if ":" in path and not path.startswith("envpool:")}


def require_trust(config: Config, made_here: bool, trusted: bool, where: str) -> None:
    """Raises `UserError` where code would be run because a config says so that was not made on this machine."""
    named = named_code(config)
    if named and not made_here and not trusted:
        fields = ", ".join(f"{field}={path}" for field, path in named.items())
        raise UserError(
            f"the config of {where} comes from an exported folder or from another machine, and playing it would import "
            f"and run {fields}; if you trust it, call this again with --trust-config"
        )


def _paths(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "environment.id", config["environment"]["id"]
    for section in ("environment", "evaluation"):
        for wrapper in config[section].get("wrappers") or ():
            yield f"{section}.wrappers", wrapper["path"]
    yield "algorithm.name", config["algorithm"].get("name")
    yield "algorithm.memory.reward", (config["algorithm"].get("memory") or {}).get("reward")
    for policy_id, policy in (config.get("policies") or {}).items():
        yield f"policies.{policy_id}.transform", policy.get("transform")
