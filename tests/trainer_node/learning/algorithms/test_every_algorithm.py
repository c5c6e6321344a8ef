"""What is promised of every algorithm, in tables that name them all: none can be added without it.

All networks see observations by the policy's statistics, gradients are those of finite differences, and what lies
behind a truncation is valued and behind a termination is not.
(That a run goes on exactly is test_resuming_every_algorithm.py.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from stagecoach.rollout_worker.exploration.base import RandomActing, Sampling
from stagecoach.shared.config.algorithms.registry import ALGORITHMS
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import PolicySpaces
from stagecoach.shared.policies.encoders import Encoder, RunningMoments
from stagecoach.shared.policies.serialization import load_state_arrays, state_arrays
from stagecoach.trainer_node.learning.building_blocks.batch import Batch
from stagecoach.trainer_node.learning.building_blocks.demonstrations import Pairs
from stagecoach.trainer_node.learning.building_blocks.interface import Experience
from tests.support.environments.small import MODULE
from tests.support.learning.algorithms import BOXES, CHOICE, ON_POLICY, make, move_apart
from tests.support.learning.experience import advantage_batch, minibatch, random_fragment
from tests.support.learning.learners import trained
from tests.support.runs.game import small

Checked = list[tuple[Callable[[], Tensor], nn.Module]]
"""Losses, each with the network that it moves."""


def of_batches(name: str, described: PolicySpaces) -> Checked:
    """Of on-policy algorithms, with an entropy bonus and what else their losses may have."""
    own: dict[str, Any] = {"ppo": {"clip_range_value": 0.5}, "appo": {"kl_coefficient": 0.5}}
    algorithm = make(name, described, entropy_coefficient=0.05, **own.get(name, {}))
    move_apart(algorithm.policy)
    batch = advantage_batch(algorithm.policy)
    if name == "appo":
        with torch.no_grad():
            batch = replace(batch, anchor_params=algorithm.target.action_parameters(batch.observations))
    clip = (0.2,) if name in {"ppo", "appo"} else ()
    return [(lambda: algorithm.loss(batch, *clip)[0], algorithm.policy)]


def of_pqn(name: str, described: PolicySpaces) -> Checked:
    algorithm, drawn = make(name, described), minibatch(described, 30)
    move_apart(algorithm.policy)
    nothing = torch.zeros(30)
    batch = Batch(drawn.observations, drawn.actions, nothing, nothing, nothing, drawn.reward)
    return [(lambda: algorithm.loss(batch)[0], algorithm.policy)]


def of_bc(name: str, described: PolicySpaces) -> Checked:
    algorithm, batch = make(name, described, entropy_coefficient=0.05), minibatch(described, 30)
    move_apart(algorithm.policy)
    pairs = Pairs(batch.observations, batch.actions)
    return [(lambda: algorithm.loss(pairs)[0], algorithm.policy)]


def of_dqn(name: str, described: PolicySpaces, **fields: Any) -> Checked:
    """Not double: the choice of the online network may jump."""
    algorithm, batch = make(name, described, double=False, **fields), minibatch(described, 30)
    move_apart(algorithm.policy, algorithm.target)
    noise = [algorithm.policy.draw_noise(torch.Generator().manual_seed(2))] * 3
    return [(lambda: algorithm.loss(batch, noise)[0], algorithm.policy)]


def of_r2d2(name: str, described: PolicySpaces) -> Checked:
    algorithm = make(name, described, double=False, loss="squared")
    move_apart(algorithm.policy, algorithm.target)
    for number in range(3):
        algorithm.observe([random_fragment(algorithm.policy, number)])
    drawn = algorithm.replay_buffer.sample(30, np.random.default_rng(1), gamma=0.9, n_step=2)
    batch = algorithm.on_device(drawn)
    return [(lambda: algorithm.loss(batch)[0], algorithm.policy)]


def of_sac(name: str, described: PolicySpaces, **fields: Any) -> Checked:
    algorithm, batch = make(name, described, initial_temperature=0.3, **fields), minibatch(described, 30)
    move_apart(algorithm.policy, algorithm.critics, algorithm.targets)
    noise = algorithm.actions.noise(30, torch.Generator().manual_seed(2))
    return [
        (lambda: algorithm.critic_loss(batch, noise)[0], algorithm.critics),
        (lambda: algorithm.actor_loss(batch, noise)[0], algorithm.policy),
    ]


def of_team(name: str, described: PolicySpaces, **fields: Any) -> Checked:
    """Three agents, some of them absent."""
    algorithm, batch = make(name, described, shape=(4, 6), agents=3, **fields), minibatch(described, 30)
    batch = replace(batch, weight=(batch.weight > 0.3).float().index_fill(0, torch.arange(0, 30, 3), 1.0))
    mixers = [algorithm.mixer, algorithm.target_mixer] if name == "qmix" else []
    move_apart(algorithm.policy, algorithm.target, *mixers)
    learned = nn.ModuleList([algorithm.policy, *mixers[:1]])
    return [(lambda: algorithm.loss(batch)[0], learned)]


def of_cql(name: str, described: PolicySpaces) -> Checked:
    algorithm, batch = make(name, described, initial_temperature=0.3, cloning_steps=9), minibatch(described, 30)
    move_apart(algorithm.policy, algorithm.critics, algorithm.targets)
    noise = algorithm.actions.noise(30, torch.Generator().manual_seed(2))
    drawn = algorithm.draw(30, torch.Generator().manual_seed(3))

    def penalized() -> Tensor:
        loss, values, _ = algorithm.critic_loss(batch, noise)
        found: Tensor = loss + 5 * algorithm.gaps(batch, values, drawn).mean(dim=1).sum()
        return found

    return [(penalized, algorithm.critics), (lambda: algorithm.actor_loss(batch, noise)[0], algorithm.policy)]


def of_td3(name: str, described: PolicySpaces, **fields: Any) -> Checked:
    algorithm, batch = make(name, described, **fields), minibatch(described, 30)
    move_apart(algorithm.policy, algorithm.critics, algorithm.targets, algorithm.target_policy)
    noise = torch.randn(30, 2, generator=torch.Generator().manual_seed(2))
    return [
        (lambda: algorithm.critic_loss(batch, noise)[0], algorithm.critics),
        (lambda: algorithm.actor_loss(batch), algorithm.policy),
    ]


def of_iql(name: str, described: PolicySpaces) -> Checked:
    """The weights of the policy's loss have no gradient: there the value stays, or they are all 1."""
    batch = minibatch(described, 30)
    learned, cloned = (make(name, described, inverse_temperature=number) for number in (3.0, 0.0))
    for algorithm in (learned, cloned):
        move_apart(algorithm.policy, algorithm.critics, algorithm.targets)
    return [
        (lambda: learned.policy_loss(batch)[0], nn.ModuleList([learned.policy.actor, learned.policy.head])),
        (lambda: cloned.policy_loss(batch)[0], cloned.policy),
        (lambda: learned.critic_loss(batch)[0], learned.critics),
    ]


GRADIENTS: dict[str, tuple[Callable[..., Checked], tuple[PolicySpaces, ...], list[dict[str, Any]]]] = {
    "a2c": (of_batches, (BOXES, CHOICE), [{}]),
    "appo": (of_batches, (BOXES, CHOICE), [{}]),
    "bc": (of_bc, (BOXES, CHOICE), [{}]),
    "cql": (of_cql, (BOXES, CHOICE), [{}]),
    "ddpg": (of_td3, (BOXES,), [{}]),
    "dqn": (of_dqn, (CHOICE,), [
        {}, {"loss": "squared", "dueling": True}, {"head": "qr", "quantiles": 5, "dueling": True},
        {"heads": 3, "dueling": True}, {"head": "hl_gauss", "atoms": 9, "v_min": -3.0, "v_max": 3.0},
    ]),
    "impala": (of_batches, (BOXES, CHOICE), [{}]),
    "iql": (of_iql, (BOXES, CHOICE), [{}]),
    "ppo": (of_batches, (BOXES, CHOICE), [{}]),
    "pqn": (of_pqn, (CHOICE,), [{}]),
    "qmix": (of_team, (CHOICE,), [{"loss": "squared"}]),
    "r2d2": (of_r2d2, (CHOICE,), [{}]),
    "rainbow": (of_dqn, (CHOICE,), [{}]),
    "sac": (of_sac, (BOXES, CHOICE), [{}]),
    "td3": (of_td3, (BOXES,), [{}]),
    "td3_bc": (of_td3, (BOXES,), [{"value_weight": 0.0}]),
    "tqc": (of_sac, (BOXES,), [{"quantiles": 5, "critics": 3}]),
    "vdn": (of_team, (CHOICE,), [{}, {"team_reward": "sum"}]),
}  # fmt: skip
"""Losses, spaces to try them on, and fields."""


@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    """Along the gradient, where float32 is fine enough to differ."""
    losses, spaces, several = GRADIENTS[name]
    for described, fields in itertools.product(spaces, several):
        for loss, network in losses(name, described, **fields):
            parameters = [tensor for tensor in network.parameters() if tensor.numel()]
            gradients = torch.autograd.grad(loss(), parameters, allow_unused=True, materialize_grads=True)
            length = float(torch.cat([gradient.flatten() for gradient in gradients]).norm())
            sides = []
            for shift in (2e-3, -4e-3):
                with torch.no_grad():
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        parameter.add_(gradient, alpha=shift / length)
                sides.append(float(loss().detach()))
            assert length > 1e-2 and (sides[0] - sides[1]) / 4e-3 == pytest.approx(length, rel=0.02)


SLOW_TARGETS: dict[str, dict[str, Any]] = {"appo": {"target_updates": 9}, "ppo": {"magnet_coefficient": 0.5}}
"""Fields with which a target network stays behind the policy for more than one update."""


@pytest.mark.parametrize("name", ALGORITHMS)
def test_networks_share_policy_observation_statistics(name: str) -> None:
    """As they are at that moment, also after a restore; and the policy's file alone holds them."""

    def moving(algorithm: Any, number: int) -> Experience:
        found = random_fragment(algorithm.policy, number)
        for column in ("obs", "final_obs", "bootstrap_obs"):
            found.columns[column] = found.columns[column] * (number + 1) + 100
        return found

    def play(algorithm: Any, updates: range) -> None:
        (now,) = algorithm.policy.normalizer.moments.values()
        seen = 0

        def look(module: nn.Module, given: tuple[Any, ...]) -> None:
            nonlocal seen
            if isinstance(module, Encoder):
                assert given[1] is not None, "a network sees raw observations"
            if isinstance(module, RunningMoments):
                seen += 1
                for buffer in ("mean", "scale"):
                    assert torch.equal(module.get_buffer(buffer), now.get_buffer(buffer))

        hook = register_module_forward_pre_hook(look)
        try:
            for number in updates:
                algorithm.update([moving(algorithm, number)], Counters(env_steps=12 * (number + 1), updates=number))
        finally:
            hook.remove()
        assert seen and int(now.get_buffer("count")) == 12 * updates.stop

    fields = SLOW_TARGETS.get(name, {})
    first, second = (make(name, policy={"normalize_observations": True}, shape=(4, 3), **fields) for _ in range(2))
    play(first, range(4))
    load_state_arrays(second.policy, state_arrays(first.policy))
    second.load_state(first.state())
    if hasattr(second, "replay_buffer"):
        second.remember([moving(second, number) for number in range(4)])
    play(second, range(4, 6))
    assert not [key for key in first.state() if "moments" in key]


OF_ONE_BOX = {"td3", "td3_bc", "ddpg", "tqc"}
GAMMA = 0.5
"""Inside is worth 1 / (1 − γ) = 2 where the limit is no end, and half of that on the doorstep."""
FAST: dict[str, Any] = {"minibatch_size": 32, "gradient_steps_per_env_step": 1.0}
OF_BATCHES: dict[str, Any] = {"max_grad_norm": 100.0}
OF_MINIBATCHES = OF_BATCHES | {"minibatch_size": 8, "epochs": 1}
VALUES: dict[str, list[dict[str, Any]]] = {
    "a2c": [OF_BATCHES],
    "appo": [OF_MINIBATCHES],
    "cql": [FAST | {"tau": 0.3, "conservatism": 1e-6, "initial_temperature": 1e-4, "learn_temperature": False}],
    "ddpg": [FAST | {"tau": 0.3}],
    "dqn": [
        FAST | {"target_update_steps": 1, "tau": 0.3} | fields
        for fields in (
            {},
            {"head": "qr", "quantiles": 3, "n_step": 2},
            {"heads": 3, "prior_scale": 1.0},
            {"head": "hl_gauss", "atoms": 16, "v_min": 0.0, "v_max": 3.0},
        )
    ],
    "impala": [OF_BATCHES],
    "iql": [FAST | {"expectile": 0.5, "target_rate": 0.3}],
    "ppo": [OF_MINIBATCHES],
    "pqn": [OF_MINIBATCHES],
    "rainbow": [FAST | {"target_update_steps": 1, "tau": 0.3, "atoms": 16, "v_min": 0.0, "v_max": 3.0, "noisy": False}],
    "sac": [FAST | {"tau": 0.3, "initial_temperature": 1e-4, "learn_temperature": False}],
    "td3": [FAST | {"tau": 0.3, "policy_delay": 1, "target_noise": 0.0}],
    "td3_bc": [FAST | {"tau": 0.3, "policy_delay": 1, "target_noise": 0.0}],
    "tqc": [FAST | {"tau": 0.3, "initial_temperature": 1e-4, "learn_temperature": False, "dropped_quantiles": 0}],
}
"""How each learns a table of values fast."""


def test_none_is_left_out() -> None:
    elsewhere = {"vdn", "qmix", "r2d2"}  # what they value is tested in test_qmix.py and test_r2d2.py
    assert set(GRADIENTS) == set(ALGORITHMS) == {*VALUES, "bc", *elsewhere}, "what has no value is bc alone"


@pytest.mark.parametrize("ends", ["truncated", "terminated"])
@pytest.mark.parametrize(("name", "fields"), [(name, fields) for name in VALUES for fields in VALUES[name]])
def test_truncation_bootstraps_and_termination_does_not(name: str, fields: dict[str, Any], ends: str) -> None:
    """From a real environment through batch or memory; nothing of it depends on the actions.

    With the first observation of the next episode for what follows it would come to 1 / (1 − γ²) = 1.33.
    """
    on_policy, boxes = name in (*ON_POLICY, "pqn"), name in OF_ONE_BOX
    updates, start = (60, 0.5) if on_policy else (10, 0.1)
    rate = {"kind": "linear", "start": start, "end": 0.0, "over": f"{updates} updates"}
    section = ALGORITHMS[name].model_validate({"name": name, "learning_rate": rate, "gamma": GAMMA, **fields})
    config = small(
        environment={"id": f"{MODULE}:Doorstep", "num_envs": 4, "kwargs": {"ends": ends, "boxes": boxes}},
        policies={"default": {"hidden_sizes": []}},
    )
    acting = Sampling() if name in ON_POLICY else RandomActing()
    algorithm, _ = trained(config, section, updates, lambda _: acting)
    inside = 1 / (1 - GAMMA) if ends == "truncated" else 1.0
    assert valued(name, algorithm).tolist() == pytest.approx([GAMMA * inside, inside], abs=0.1)


@torch.no_grad()
def valued(name: str, algorithm: Any) -> Tensor:
    """What the two places are worth, `[2]`."""
    seen, policy = {"obs": torch.tensor([0, 1])}, algorithm.policy
    if name in {"dqn", "pqn", "rainbow"}:
        found: Tensor = policy.action_parameters(seen).mean(dim=1)
    elif name in {"iql", *ON_POLICY}:
        found = policy.value(seen)
    else:
        actions = torch.zeros(2, 1) if name in OF_ONE_BOX else None
        found = algorithm.critics(seen, None, actions).mean(dim=(0, 2))
    return found
