"""Registry of policy classes by kind, and construction from config and spaces.

A file that arrives over the network names a kind, never code: custom modules register their kinds.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.base.user_code import import_class, import_object, make_own
from stagecoach.shared.config.algorithms.base import AlgorithmConfig
from stagecoach.shared.config.sections import PolicyConfig, RunPolicyConfig
from stagecoach.shared.experience.spaces import PolicySpaces
from stagecoach.shared.policies.policy import Policy

_BUILT_IN = {
    "actor_critic": "stagecoach.shared.policies.actor_critic:ActorCritic",
    "q_network": "stagecoach.shared.policies.q_network:QNetwork",
    "recurrent_q_network": "stagecoach.shared.policies.q_network:RecurrentQNetwork",
    "actor": "stagecoach.shared.policies.continuous:Actor",
    "deterministic": "stagecoach.shared.policies.continuous:Deterministic",
    "recurrent_actor_critic": "stagecoach.shared.policies.actor_critic:RecurrentActorCritic",
}
_registered: dict[str, type[Policy]] = {}
_RANDOM_STATE = threading.Lock()


def register_policy(policy: type[Policy]) -> type[Policy]:
    """Registers a kind of policy for an algorithm of your own; a class decorator.

        @stagecoach.register_policy
        class Mixture(stagecoach.Policy):
            kind = "mixture"

    A class that `policies.<id>.network` names needs no registration.

    Args:
        policy: The class. Checkpoints, and `policy` of the algorithm's `Config`, name it by its `kind`.

    Returns:
        The class.

    Raises:
        ConfigError: Another class has this kind.
    """
    if policy.kind in _BUILT_IN or _registered.get(policy.kind, policy).__qualname__ != policy.__qualname__:
        raise ConfigError(f"the kind of policy {policy.kind!r} of {policy.__qualname__} is taken; choose another word")
    _registered[policy.kind] = policy
    return policy


def is_registered(kind: str) -> bool:
    return kind in _BUILT_IN or kind in _registered


def policy_class(kind: str) -> type[Policy]:
    """Returns the class; raises `ConfigError` for a kind that is not registered."""
    if kind in _BUILT_IN:
        found: type[Policy] = import_object(_BUILT_IN[kind], "policy")
        return found
    if kind not in _registered:
        raise ConfigError(
            f"no class for policies of kind {kind!r}; known are {', '.join(sorted({**_BUILT_IN, **_registered}))}. "
            f"Import the module that registers it (stagecoach.register_policy) first"
        )
    return _registered[kind]


def torch_device(name: str) -> torch.device:
    """Resolves `auto` to a GPU if there is one. Ray shows a process only its own GPUs, and counts them from 0."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if number and int(number) >= torch.cuda.device_count():
        name = kind
    return torch.device(name)


@contextmanager
def borrowed_random_state(seed: int = 0) -> Iterator[None]:
    """Locks and restores PyTorch's global random state, which initial weights are drawn from."""
    with _RANDOM_STATE, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def build_policies(
    spaces: Mapping[str, PolicySpaces], configs: Mapping[str, PolicyConfig], algorithm: AlgorithmConfig, seed: int,
    slots: Callable[[str], int] = lambda policy_id: 1,
) -> dict[str, Policy]:  # fmt: skip
    """Builds one policy per policy id, initialized from `seed` alone (the global random state is restored); `algorithm`
    is the default of policies, and `slots` returns how many agents of a policy a team's critic sees. Raises
    `ConfigError` for a recurrent core whose algorithm cannot learn sequences."""
    policies = {}
    for index, policy_id in enumerate(sorted(spaces)):
        config, (chosen, made) = configs[policy_id], _chosen(policy_id, configs[policy_id], algorithm)
        own = config.network if isinstance(config, RunPolicyConfig) else None
        config, network = config.carried if isinstance(config, RunPolicyConfig) else config, chosen.network()
        if config.critic_observes == "team":
            network["agents"] = slots(policy_id)
        with borrowed_random_state(seed + index):
            if own is None:
                policies[policy_id] = made(spaces[policy_id], config, **network)
                continue
            field = f"policies.{policy_id}.network"
            if twice := sorted(network.keys() & own.kwargs.keys()):
                raise ConfigError(f"{field}: kwargs {twice} are set by algorithm {chosen.name}; use other names")
            policy = make_own(own.path, field, made, spaces[policy_id], config, **network, **own.kwargs)
            if getattr(policy, "distribution", None) is None:
                raise ConfigError(f"{field}={own.path}: call super().__init__(spaces, config, **network) in __init__")
            policy.network |= own.kwargs
            policies[policy_id] = policy
    return policies


def import_policies(configs: Mapping[str, RunPolicyConfig], algorithm: AlgorithmConfig) -> None:
    """Imports a run's custom algorithms and networks, so that their kinds are registered; raises `ConfigError`."""
    for policy_id, config in configs.items():
        _chosen(policy_id, config, algorithm)


def _chosen(policy_id: str, config: PolicyConfig, algorithm: AlgorithmConfig) -> tuple[AlgorithmConfig, type[Policy]]:
    """Returns the algorithm and the class of a policy; a custom class is registered."""
    run = config if isinstance(config, RunPolicyConfig) else RunPolicyConfig()
    chosen = (run.algorithm or algorithm).resolved()
    kind = chosen.policy if config.core == "none" else chosen.recurrent_policy
    if kind is None:
        raise ConfigError(
            f"policies.{policy_id}.core={config.core}: algorithm {chosen.name} learns single steps and cannot "
            f"train a recurrent core; set core=none, or use an algorithm that learns sequences, such as ppo or r2d2"
        )
    if run.network is None:
        return chosen, policy_class(kind)
    advice = (
        f"an nn.Module of yours goes into its make_encoder; {chosen.name} learns a recurrent policy if "
        f"policies.{policy_id}.core is lstm or gru"
        if config.core == "none" and chosen.recurrent_policy
        else "an nn.Module of yours goes into its make_encoder"
    )
    own = import_class(run.network.path, f"policies.{policy_id}.network", policy_class(kind), advice)
    if "kind" not in vars(own):
        own.kind = run.network.path
    return chosen, register_policy(own)
