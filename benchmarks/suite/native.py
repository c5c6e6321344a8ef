"""`native`: how fast the whole path is where environments cost next to nothing, on two cores.

Gymnasium's own vectorized CartPole, a rollout worker that acts thousands of its copies at once, Redis, and a trainer
that takes one gradient step for each batch: each in a process of its own. Beside it, each part alone on one core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from benchmarks.kit.measure import Measure, Result
from benchmarks.kit.options import Options, in_turns, per_second
from benchmarks.suite.pinning import first_cores, on_cores
from benchmarks.suite.roles import Measured, running, train, work
from stagecoach.coordinator.lifecycle.validation import check
from stagecoach.rollout_worker.environments.factory import make_vector
from stagecoach.rollout_worker.environments.seeding import SeedLineage
from stagecoach.rollout_worker.exploration.base import Sampling
from stagecoach.rollout_worker.sampling.sampler import Sampler
from stagecoach.shared.config.loading import parse_config
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience import fragment
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.fragment import Fragment, FragmentHeader
from stagecoach.shared.policies.registry import build_policies
from stagecoach.trainer_node.learning.learner import make_learner, set_up_torch

AIM = 500_000
_CORES = 2
_RUN = "alone"


@dataclass(frozen=True)
class Sizes:
    """How large, and for how long."""

    num_envs: int = 2048
    steps: int = 16
    seconds: float = 6.0
    """Of each measurement of the whole path."""
    seconds_alone: float = 2.0


_NETWORKS: dict[str, dict[str, Any]] = {
    "one layer of 32": {"hidden_sizes": [32], "share_encoder": True},
    "two layers of 64, twice": {"hidden_sizes": [64, 64], "share_encoder": False},
}
"""A light one, and the reference for classic control: actor and critic each."""
_LIGHT, _REFERENCE = _NETWORKS


def asked(network: str, sizes: Sizes) -> dict[str, Any]:
    """The config: one gradient step for each fragment, and one fragment ahead, so that acting and learning overlap."""
    return {
        "environment": {"id": "CartPole-v1", "vectorization": "native", "num_envs": sizes.num_envs},
        "rollout": {
            "workers": 1, "fragment_steps": sizes.steps, "fragments_per_update": 1, "max_policy_lag": 1,
            "max_log_bytes": 512 << 20,
        },
        "policies": {"default": _NETWORKS[network]},
        "algorithm": {"name": "impala"},
        "checkpoint": {"every": "1000 updates"},
        "evaluation": {"episodes": 1},
        "metrics": {"writers": []},
        "stop_at": {"updates": 10**9},
    }  # fmt: skip


def config_of(network: str, sizes: Sizes) -> Config:
    """`asked`, with all defaults."""
    return parse_config(asked(network, sizes))


class Alone:
    """The parts of the path, each on its own, with the same sizes."""

    def __init__(self, network: str, sizes: Sizes) -> None:
        self._sizes, self._config = sizes, config_of(network, sizes)
        self._description = check(self._config)
        algorithm = self._config.algorithm.resolved()
        self._policies = build_policies(self._description.policies, self._config.policies, algorithm, seed=0)
        vector = make_vector(self._config.environment, self._description)
        self._sampler = Sampler(vector, self._description, SeedLineage(0, 0, 0, 0))
        self.learner = make_learner(self._config, self._description)
        self._bytes = self.act()

    @property
    def transitions(self) -> int:
        """In a fragment."""
        return self._sizes.num_envs * self._sizes.steps

    def act(self) -> bytes:
        """One fragment, acted and encoded."""
        rollout = self._config.rollout
        sample = self._sampler.sample(self._policies, dict.fromkeys(self._policies, Sampling()), rollout.fragment_steps)
        header = FragmentHeader(
            _RUN, "worker-0", 0, 0, Phase.TRAIN, dict.fromkeys(self._policies, 0), rollout.fragment_steps,
            self._sizes.num_envs, sample.episodes,
        )  # fmt: skip
        return fragment.encode(Fragment(header, sample.columns))

    def learn(self) -> None:
        """One fragment, decoded, checked and learned from."""
        item = fragment.decode(self._bytes)
        fragment.check(item, _RUN, self._description)
        item = replace(item, position="1-0")
        self.learner.emulate_acting([item], Phase.TRAIN)
        self.learner.learn([item], Phase.TRAIN)

    def environments(self) -> float:
        """Steps a second, of random actions that are there already."""
        copies = self._sizes.num_envs
        made = gym.make_vec("CartPole-v1", copies, vectorization_mode="vector_entry_point")
        made.reset(seed=1)
        choices = np.random.default_rng(0).integers(0, 2, (64, copies))
        rate = per_second(lambda: sum(len(made.step(row)[1]) for row in choices), self._sizes.seconds_alone)
        made.close()
        return rate

    def worker(self) -> float:
        """Steps a second."""
        return self._rate(self.act)

    def trainer(self) -> float:
        """Steps a second."""
        return self._rate(self.learn)

    def _rate(self, once: Callable[[], object]) -> float:
        def counted() -> int:
            once()
            return self.transitions

        return per_second(counted, self._sizes.seconds_alone)

    @property
    def bytes_per_step(self) -> float:
        """Of a fragment on the wire."""
        return len(self._bytes) / self.transitions


def measure(options: Options) -> Result:
    """The whole path with both networks, in turns with its parts."""
    sizes = Sizes(64, 8, 0.5, 0.1) if options.quick else Sizes()
    found: dict[str, list[Measured]] = {}
    names = {network: f"the whole path, {network}" for network in _NETWORKS}
    threads = torch.get_num_threads()
    set_up_torch(config_of(_LIGHT, sizes).trainer)  # one thread, as in the roles
    alone = Alone(_LIGHT, sizes)
    calls: dict[str, Callable[[], float]] = {
        name: partial(_whole, config_of(network, sizes), sizes.seconds, found.setdefault(name, []))
        for network, name in names.items()
    } | {
        "environments alone, on one core": alone.environments,
        "a worker alone, on one core": alone.worker,
        "the learner alone, on one core": alone.trainer,
    }  # fmt: skip
    cores = first_cores(_CORES)
    with on_cores(*cores):
        samples = in_turns(options, {name: call for name, call in calls.items() if options.wants(name)})
    torch.set_num_threads(threads)
    rates = [
        Measure(name, "env steps/s", taken, aim=AIM if name == names[_LIGHT] and not options.quick else None)
        for name, taken in samples.items()
    ]
    return Result(
        "native",
        "How many env steps a second are acted, carried and learned from on two cores, where the environment is "
        "vectorized itself (environment.vectorization=native) and the algorithm is light? Counted at the trainer, in "
        "published policy versions; steps in which an environment only starts again do not count.",
        [*rates, *_costs(names[_LIGHT], found[names[_LIGHT]][-options.repeats :])],
        settings={
            "cores": cores,
            "config": asked(_LIGHT, sizes),
            "the other network": _NETWORKS[_REFERENCE],
            "seconds": {"the whole path": sizes.seconds, "alone": sizes.seconds_alone},
            "bytes of a fragment per env step": round(alone.bytes_per_step, 2),
            "not in 'alone'": "claims, pushing and reading, publication, checkpoints, heartbeats, figures",
        },
        remarks=[
            "Redis, the worker and the trainer share the two cores; the processor times say what each took of them.",
            "IMPALA takes one gradient step for each batch; with its correction for a policy lag of one version, the "
            "worker acts the next fragment while the trainer learns from this one.",
            "Parts alone have the machine to themselves: at once they slow each other down where cores share caches.",
        ],
    )  # fmt: skip


def _whole(config: Config, seconds: float, into: list[Measured]) -> float:
    with running(config, {"trainer": train, "worker-0": work}) as roles:
        into.append(roles.measure(seconds))
    return into[-1].rate


def _costs(name: str, found: list[Measured]) -> list[Measure]:
    """Processor time of each role for each env step, of the runs that count."""
    return [
        Measure(f"{name}: {role}", "µs of processor per env step", [run.microseconds[role] for run in found],
                better="less")
        for role in (found[0].microseconds if found else ())
    ]  # fmt: skip
