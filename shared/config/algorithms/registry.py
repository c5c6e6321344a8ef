"""All algorithms by name, as the type of the config's `algorithm`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import BeforeValidator, Discriminator, Tag

from stagecoach.shared.config.algorithms.base import AlgorithmConfig, OwnAlgorithm
from stagecoach.shared.config.algorithms.off_policy import DDPGConfig, SACConfig, TD3Config, TQCConfig
from stagecoach.shared.config.algorithms.offline import BCConfig, CQLConfig, IQLConfig, TD3BCConfig
from stagecoach.shared.config.algorithms.on_policy import A2CConfig, APPOConfig, IMPALAConfig, PPOConfig
from stagecoach.shared.config.algorithms.q_learning import (
    DQNConfig,
    PQNConfig,
    QMIXConfig,
    R2D2Config,
    RainbowConfig,
    VDNConfig,
)

ALGORITHMS: dict[str, type[AlgorithmConfig]] = {
    section.model_fields["name"].default: section
    for section in (
        A2CConfig, APPOConfig, BCConfig, CQLConfig, DDPGConfig, DQNConfig, IMPALAConfig, IQLConfig, PPOConfig,
        PQNConfig, QMIXConfig, R2D2Config, RainbowConfig, SACConfig, TD3BCConfig, TD3Config,
        TQCConfig, VDNConfig,
    )
}  # fmt: skip
"""Name → section of the built-in algorithms."""
OWN = "own"
"""Tag of a custom algorithm."""


def tag_of(value: Any) -> str:
    """Returns the tag of the section `algorithm`: its name, `ppo` by default."""
    name = value.get("name", "ppo") if isinstance(value, dict) else getattr(value, "name", value)
    return OWN if isinstance(name, str) and ":" in name else str(name)


def with_algorithm_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a run's config as plain data, completed with the algorithm's defaults of other sections. A custom
    algorithm has none, since they would have to be imported."""
    algorithm = data.get("algorithm", "ppo")
    policies = data.get("policies", {"default": {}})
    if isinstance(policies, Mapping):
        policies = {policy_id: _with_algorithm(its, algorithm) for policy_id, its in policies.items()}
    return dict(_below({**data, "policies": policies}, _defaults(data)))


def without_algorithm_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a resolved config, as plain data, without what `with_algorithm_defaults` completes."""
    algorithm = _from_name(data.get("algorithm", "ppo"))
    policies = {}
    for policy_id, its in data.get("policies", {}).items():
        own = its.get("algorithm")
        section = ALGORITHMS.get(tag_of(own or algorithm))
        policies[policy_id] = _without(its, {} if section is None else section.defaults.get("policies", {}))
        if own is not None:
            policies[policy_id]["algorithm"] = {"name": own["name"], **_without(own, algorithm)}
    return {**_without(data, _defaults(data)), **({"policies": policies} if policies else {})}


def _defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of the algorithm for all sections but `policies`."""
    section = ALGORITHMS.get(tag_of(data.get("algorithm", "ppo")))
    defaults = {} if section is None else {**section.defaults, "policies": {}}
    if data.get("dataset") is not None:
        defaults.pop("heatup", None)  # recorded experience is not acted at random
    return defaults


def _with_algorithm(policy: Any, algorithm: Any) -> Any:
    """Completes a policy's section with its algorithm's fields and defaults."""
    if not isinstance(policy, Mapping):
        return policy
    if (own := policy.get("algorithm")) is not None:
        common = _from_name(algorithm)
        algorithm = _over(_from_name(own), {"name": "ppo", **common} if isinstance(common, Mapping) else common)
        policy = {**policy, "algorithm": algorithm}
    section = ALGORITHMS.get(tag_of(algorithm))
    return _below(policy, {} if section is None else section.defaults.get("policies", {}))


def _over(own: Any, common: Any) -> Any:
    """Completes `own` from `common`, unless their `name` or `kind` differ."""
    if not (isinstance(own, Mapping) and isinstance(common, Mapping)):
        return own
    if any(own.get(tag, common.get(tag)) != common.get(tag) for tag in ("name", "kind")):
        return own
    return {**common, **{name: _over(value, common.get(name)) for name, value in own.items()}}


def _below(given: Any, defaults: Any) -> Any:
    """Completes `given` from `defaults`."""
    if not (isinstance(given, Mapping) and isinstance(defaults, Mapping)):
        return given
    return {**defaults, **{name: _below(value, defaults.get(name)) for name, value in given.items()}}


def _without(given: Any, common: Any) -> Any:
    """Returns `given` without the values that `common` has as well, unless their `name` or `kind` differ."""
    if not (isinstance(given, Mapping) and isinstance(common, Mapping)):
        return given
    if any(tag in given and tag in common and given[tag] != common[tag] for tag in ("name", "kind")):
        return given
    differing = {name: value for name, value in given.items() if name not in common or value != common[name]}
    return {name: _without(value, common.get(name)) for name, value in differing.items()}


def _from_name(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


if TYPE_CHECKING:
    AlgorithmField = AlgorithmConfig
else:
    _TAGGED = [Annotated[section, Tag(name)] for name, section in ALGORITHMS.items()]
    AlgorithmField = Annotated[
        Union[(*_TAGGED, Annotated[OwnAlgorithm, Tag(OWN)])], Discriminator(tag_of), BeforeValidator(_from_name)
    ]
"""An algorithm's section or name, as a config field."""
