"""Learners of a whole config, made-up runs for them without Redis, and their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.rollout_worker.environments.factory import make_vector
from stagecoach.rollout_worker.environments.seeding import SeedLineage
from stagecoach.rollout_worker.exploration.base import Exploration, Sampling
from stagecoach.rollout_worker.sampling.sampler import Sampler
from stagecoach.shared.config.algorithms.base import AlgorithmConfig
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.datasets.read import read_dataset
from stagecoach.shared.experience.counters import Counters, Phase
from stagecoach.shared.experience.fragment import Fragment, FragmentHeader
from stagecoach.shared.policies.registry import build_policies
from stagecoach.shared.policies.serialization import state_arrays
from stagecoach.shared.protocol.ledger import Ledger
from stagecoach.trainer_node.learning.building_blocks.interface import Experience, Setting
from stagecoach.trainer_node.learning.learner import Learner, make_algorithm, make_learner
from stagecoach.trainer_node.state import snapshot
from stagecoach.trainer_node.state.log_consumer import Committed
from stagecoach.trainer_node.state.snapshot import Progress


def learner_of(config: Config) -> Learner:
    return make_learner(config, describe_environment(config), read_dataset=read_dataset)


def sampler_of(config: Config) -> Sampler:
    description = describe_environment(config)
    return Sampler(make_vector(config.environment, description), description, SeedLineage(1, 0, 0, 0))


def trained(
    config: Config, section: AlgorithmConfig, updates: int, exploration: Callable[[int], Exploration]
) -> tuple[Any, list[float]]:
    """An algorithm after so many updates of 8 steps, acted with the exploration of each; and the episodes' returns."""
    num_envs = config.environment.num_envs
    policies = build_policies(describe_environment(config).policies, config.policies, section, seed=1)
    algorithm = make_algorithm(policies["default"], section, Setting(torch.device("cpu"), 1, 8, num_envs))
    returns: list[float] = []
    with contextlib.closing(sampler_of(config)) as sampler:
        for update in range(updates):
            sample = sampler.sample(policies, {"default": exploration(update)}, 8)
            returns += [record.episode_return for record in sample.episodes]
            counters = Counters(env_steps=8 * num_envs * (update + 1), updates=update)
            algorithm.update([Experience("worker-0:0", sample.columns["default"])], counters)
    return algorithm, returns


class Side:
    """A learner, and a worker of its own that acts with what it has learned."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.description = describe_environment(config)
        self.learner = learner_of(config)

    def taken(self) -> snapshot.Snapshot:
        progress = Progress(0, 0)
        accounting = Committed("0-0", Ledger().as_json(), {})
        return snapshot.take(self.learner, self.config, "r", progress, accounting)

    def weights(self) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for policy_id, policy in self.learner.policies.items():
            found |= {f"{policy_id}/{name}": array.tobytes() for name, array in state_arrays(policy).items()}
        return found


def experience(config: Config, updates: int) -> list[list[Fragment]]:
    """Fragments of each update, acted with the untrained policy."""
    policies, sampler = learner_of(config).policies, sampler_of(config)
    steps, versions = config.rollout.fragment_steps, dict.fromkeys(policies, 0)
    found = list[list[Fragment]]()
    for _ in range(updates):
        taken = list[Fragment]()
        for _ in range(config.rollout.fragments_per_update):
            sample = sampler.sample(policies, dict.fromkeys(policies, Sampling()), steps)
            header = FragmentHeader(
                "r", "worker-0", 0, 0, Phase.TRAIN, versions, steps, config.environment.num_envs,
                tuple(sample.episodes),
            )  # fmt: skip
            taken.append(Fragment(header, sample.columns, f"{len(found) + 1}-{len(taken)}"))
        found.append(taken)
    sampler.close()
    return found


def copies(fragments: list[Fragment]) -> list[Fragment]:
    """Emulating acting changes a fragment."""
    return [
        Fragment(item.header, {name: dict(columns) for name, columns in item.columns.items()}, item.position)
        for item in fragments
    ]


def learn(learner: Learner, fragments: list[Fragment], phase: Phase = Phase.TRAIN) -> dict[str, float]:
    """One update, as the trainer does it."""
    taken = copies(fragments)
    learner.emulate_acting(taken, phase)
    return learner.learn(taken, phase)


def have_the_same_gradients(together: Side, alone: Side) -> None:
    """But for rounding: by what the optimizers keep of them; and all else that the algorithms keep."""
    moved = False
    for policy_id, algorithm in alone.learner.algorithms.items():
        one, several = algorithm.state(), together.learner.algorithms[policy_id].state()
        assert set(one) == set(several)
        for name, array in one.items():
            moved |= name.endswith("exp_avg") and abs(array).max() > 1e-3
            assert several[name] == pytest.approx(array, rel=1e-3, abs=1e-5), name
    assert moved
