"""Which class a kind of policy is, and policies made from config and spaces.

A file that arrives over the network names a kind, never code: kinds of a user's own are known once the user's module,
which the run's config names, has registered them.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from shared.algorithm_configs.section import AlgorithmConfig
from shared.config import PolicyConfig
from shared.errors import ConfigError
from shared.policies.policy import Policy
from shared.spaces import PolicySpaces

_BUILT_IN = {
    "actor_critic": "shared.policies.actor_critic:ActorCritic",
    "q_network": "shared.policies.q_network:QNetwork",
    "actor": "shared.policies.actor:Actor",
    "deterministic": "shared.policies.actor:Deterministic",
    "recurrent_actor_critic": "shared.policies.recurrent:RecurrentActorCritic",
}
_registered: dict[str, type[Policy]] = {}
_RANDOM_STATE = threading.Lock()


def register_policy(policy: type[Policy]) -> type[Policy]:
    """Class decorator: files of this `kind` are read with this class."""
    if policy.kind in _BUILT_IN or _registered.get(policy.kind, policy).__qualname__ != policy.__qualname__:
        raise ConfigError(f"the kind of policy {policy.kind!r} of {policy.__qualname__} is taken; choose another word")
    _registered[policy.kind] = policy
    return policy


def policy_class(kind: str) -> type[Policy]:
    """The class; raises `ConfigError` for a kind that nobody has registered."""
    if kind in _BUILT_IN:
        module, _, name = _BUILT_IN[kind].partition(":")
        found: type[Policy] = getattr(importlib.import_module(module), name)
        return found
    if kind not in _registered:
        raise ConfigError(
            f"no class for policies of kind {kind!r}; known are {', '.join(sorted({**_BUILT_IN, **_registered}))}. "
            f"Import the module that registers it (shared.policies.registry.register_policy) first"
        )
    return _registered[kind]


def torch_device(name: str) -> torch.device:
    """`auto` takes a GPU if there is one. Ray shows a process only its own GPUs, and counts them from 0."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if number and int(number) >= torch.cuda.device_count():
        name = kind
    return torch.device(name)


@contextmanager
def borrowed_random_state(seed: int = 0) -> Iterator[None]:
    """PyTorch draws initial weights from one global state: for one thread at a time, and given back as it was."""
    with _RANDOM_STATE, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def build_policies(
    spaces: Mapping[str, PolicySpaces], configs: Mapping[str, PolicyConfig], algorithm: AlgorithmConfig, seed: int
) -> dict[str, Policy]:
    """One policy per policy id, initialised from `seed` alone (the global random state is left as it was).

    Raises `ConfigError` for one that is to remember where the algorithm cannot learn that.
    """
    chosen = algorithm.resolved()
    policies = {}
    for index, policy_id in enumerate(sorted(spaces)):
        made = policy_class(_kind(chosen, configs[policy_id], policy_id))
        with borrowed_random_state(seed + index):
            policies[policy_id] = made(spaces[policy_id], configs[policy_id], **chosen.network())
    return policies


def _kind(algorithm: AlgorithmConfig, config: PolicyConfig, policy_id: str) -> str:
    if config.core == "none":
        return algorithm.policy
    if algorithm.recurrent_policy is None:
        raise ConfigError(
            f"policies.{policy_id}.core={config.core}: algorithm {algorithm.name} learns single steps and cannot learn "
            f"what to remember; set core=none, or take an algorithm that learns sequences, such as ppo"
        )
    return algorithm.recurrent_policy
