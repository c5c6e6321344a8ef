"""All algorithms by name, as the type of the config's `algorithm`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Tag

from shared.algorithm_configs.a2c import A2CConfig
from shared.algorithm_configs.appo import APPOConfig
from shared.algorithm_configs.bc import BCConfig
from shared.algorithm_configs.cql import CQLConfig
from shared.algorithm_configs.ddpg import DDPGConfig
from shared.algorithm_configs.dqn import DQNConfig, RainbowConfig
from shared.algorithm_configs.impala import IMPALAConfig
from shared.algorithm_configs.iql import IQLConfig
from shared.algorithm_configs.ppo import PPOConfig
from shared.algorithm_configs.sac import SACConfig
from shared.algorithm_configs.section import AlgorithmConfig, OwnAlgorithm
from shared.algorithm_configs.td3 import TD3Config

ALGORITHMS: dict[str, type[AlgorithmConfig]] = {
    "a2c": A2CConfig,
    "appo": APPOConfig,
    "bc": BCConfig,
    "cql": CQLConfig,
    "ddpg": DDPGConfig,
    "dqn": DQNConfig,
    "impala": IMPALAConfig,
    "iql": IQLConfig,
    "ppo": PPOConfig,
    "rainbow": RainbowConfig,
    "sac": SACConfig,
    "td3": TD3Config,
}
"""Name → section of the algorithms that come with Stagecoach."""
OWN = "own"
"""The tag of an algorithm of the user's."""


def tag_of(value: Any) -> str:
    """Which section `algorithm` is, by its name: `ppo` where it has none."""
    name = value.get("name", "ppo") if isinstance(value, dict) else getattr(value, "name", value)
    return OWN if isinstance(name, str) and ":" in name else str(name)


def with_algorithm_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """A run's config as plain data, with the defaults that its algorithm has for other sections where it says nothing.

    Nothing is known of a user's own algorithm here, since that would have to be imported.
    """
    section = ALGORITHMS.get(tag_of(data.get("algorithm", "ppo")))
    if section is None:
        return dict(data)
    defaults, policies = dict(section.defaults), data.get("policies", {"default": {}})
    each = defaults.pop("policies", {})
    if isinstance(policies, Mapping):
        defaults["policies"] = dict.fromkeys(policies, each)
    if data.get("dataset") is not None:
        defaults.pop("heatup", None)  # recorded experience is not acted at random
    return dict(_below({**data, "policies": policies}, defaults))


def _below(given: Any, defaults: Any) -> Any:
    """`given`, and what `defaults` has beside it."""
    if not (isinstance(given, Mapping) and isinstance(defaults, Mapping)):
        return given
    return {**defaults, **{name: _below(value, defaults.get(name)) for name, value in given.items()}}


def _from_name(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


AlgorithmField = Annotated[
    Annotated[A2CConfig, Tag("a2c")]
    | Annotated[APPOConfig, Tag("appo")]
    | Annotated[BCConfig, Tag("bc")]
    | Annotated[CQLConfig, Tag("cql")]
    | Annotated[DDPGConfig, Tag("ddpg")]
    | Annotated[DQNConfig, Tag("dqn")]
    | Annotated[IMPALAConfig, Tag("impala")]
    | Annotated[IQLConfig, Tag("iql")]
    | Annotated[PPOConfig, Tag("ppo")]
    | Annotated[RainbowConfig, Tag("rainbow")]
    | Annotated[SACConfig, Tag("sac")]
    | Annotated[TD3Config, Tag("td3")]
    | Annotated[OwnAlgorithm, Tag(OWN)],
    Discriminator(tag_of),
    BeforeValidator(_from_name),
]
"""An algorithm's section, or only its name, as a config field."""
