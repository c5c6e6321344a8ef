"""Playing a policy for a number of episodes and summing up the scores; used by the evaluator and by `evaluate`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch

from rollout_worker.environments import make_vector
from rollout_worker.exploration import Greedy, Sampling
from rollout_worker.making import evaluation_environment
from rollout_worker.vector import VectorEnvironment, refuse_unusable
from rollout_worker.watchdog import Watchdog, WatchedEnvironment
from shared.checkpoint import checkpoint_version
from shared.config import Config
from shared.errors import EnvironmentFailure
from shared.fragment import LARGEST_SHOWN, EpisodeRecord
from shared.policies.policy import Policy
from shared.policies.stateful import with_states
from shared.printable import counted
from shared.spaces import EnvironmentDescription

SCORING, CONFIRMING = 0, 1
"""The rounds of a checkpoint's evaluation: every one is scored; what may be the best is confirmed from other starts."""


@dataclass(frozen=True)
class Scores:
    """The outcome of an evaluation."""

    episodes: tuple[EpisodeRecord, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: mean, spread, bounds, lengths, success rate, and the environment's own metrics."""
        returns = [record.episode_return for record in self.episodes]
        successes = [record.success for record in self.episodes if record.success is not None]
        names = sorted({name for record in self.episodes for name in record.metrics})
        return {
            "episodes": len(returns),
            "mean_return": fmean(returns),
            "std_return": pstdev(returns),  # exactly 0 where all are equal
            "min_return": min(returns),
            "max_return": max(returns),
            "mean_length": fmean(record.length for record in self.episodes),
            "success_rate": fmean(successes) if successes else None,
            "metrics": {
                name: fmean(record.metrics[name] for record in self.episodes if name in record.metrics)
                for name in names
            },
        }


def evaluation_seed(config: Config, checkpoint: str, evaluation_round: int) -> int:
    """The seed of the first environment's first episode, 32 bits.

    Another one for each checkpoint and round, and the same whenever that is played again; with `evaluation.seed` the
    same for all checkpoints.
    """
    fixed = config.evaluation.seed
    whose = [config.seed, checkpoint_version(checkpoint) or 0] if fixed is None else [fixed]
    return int(np.random.SeedSequence([*whose, evaluation_round]).generate_state(1)[0])


@torch.inference_mode()
def play(
    environment: VectorEnvironment,
    description: EnvironmentDescription,
    policies: Mapping[str, Policy],
    episodes: int,
    *,
    greedy: bool,
    seed: int,
    deadline_seconds: float = float("inf"),
) -> Scores:
    """Plays exactly `episodes` episodes; each environment plays its share, so that short ones aren't favoured."""
    exploration = Greedy() if greedy else Sampling()
    generator = torch.Generator().manual_seed(seed)
    copies = environment.num_envs
    shares = [(episodes + index) // copies for index in range(copies)]
    records: list[list[EpisodeRecord]] = [[] for _ in range(copies)]
    now = environment.reset([seed + index for index in range(copies)])
    remembering = with_states(policies, {policy_id: len(mask) for policy_id, (_, mask) in now.items()})
    acting = {**policies, **remembering}
    started = time.monotonic()
    while any(len(done) < share for done, share in zip(records, shares, strict=True)):
        if time.monotonic() - started > deadline_seconds:
            raise EnvironmentFailure(
                f"{counted(episodes, 'episode')} did not end within evaluation.deadline_seconds={deadline_seconds:g}; "
                f"set environment.max_episode_steps, or more time"
            )
        refuse_unusable({policy_id: observations for policy_id, (observations, _) in now.items()}, description)
        actions = {}
        for policy_id, (observations, _) in now.items():
            tensors = {name: torch.from_numpy(array) for name, array in observations.items()}
            chosen, _ = exploration.act(acting[policy_id], tensors, generator)
            actions[policy_id] = {name: tensor.numpy() for name, tensor in chosen.items()}
        step = environment.step(actions)
        now = {policy_id: (result.obs, result.mask) for policy_id, result in step.policies.items()}
        for policy_id, its in remembering.items():
            its.forget(torch.from_numpy(step.policies[policy_id].over))
        for index, record in step.episodes:
            if len(records[index]) < shares[index]:
                records[index].append(replace(record))
    played = tuple(record for done in records for record in done)
    if not all(abs(record.episode_return) <= LARGEST_SHOWN for record in played):
        raise EnvironmentFailure(
            f"an evaluated episode returned NaN or more than {LARGEST_SHOWN:g}; look at the environment's rewards"
        )
    return Scores(played)


def evaluate_policies(
    config: Config,
    description: EnvironmentDescription,
    policies: Mapping[str, Policy],
    seed: int,
    episodes: int | None = None,
    watchdog: Watchdog | None = None,
) -> Scores:
    """Makes the evaluation environments, plays from the starts of `seed`, closes them; raises `EnvironmentFailure`."""
    evaluation = config.evaluation

    def make() -> VectorEnvironment:
        return make_vector(evaluation_environment(config, episodes), description)

    environment = make() if watchdog is None else WatchedEnvironment(make, watchdog)
    try:
        return play(
            environment,
            description,
            policies,
            episodes or evaluation.episodes,
            greedy=evaluation.greedy,
            seed=seed,
            deadline_seconds=evaluation.deadline_seconds,
        )
    finally:
        environment.close()
