"""The real learner in a process of its own, fed with fragments that were recorded and decoded before: learning alone.

It emulates acting and learns, update by update, as a trainer does between taking fragments in and publishing.
"""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.suite.end_to_end_cases import Case
from benchmarks.suite.pinning import begin_on
from stagecoach.coordinator.lifecycle.validation import check
from stagecoach.rollout_worker.acting_policies import make_exploration
from stagecoach.rollout_worker.environments.factory import make_vector
from stagecoach.rollout_worker.environments.seeding import SeedLineage
from stagecoach.rollout_worker.sampling.sampler import Sampler
from stagecoach.shared.config.loading import parse_config
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience import fragment
from stagecoach.shared.experience.counters import Phase, PhaseCounters
from stagecoach.shared.experience.fragment import Fragment, FragmentHeader
from stagecoach.shared.policies.registry import build_policies
from stagecoach.trainer_node.learning.learner import make_learner, set_up_torch

_READY_SECONDS = 300.0
_UPDATES = 4
"""Of recorded fragments, so that not each update learns from the same ones."""


class LearningAlone:
    """The learner's process, as seen from here."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    @classmethod
    @contextmanager
    def open(cls, case: Case, core: int) -> Iterator[LearningAlone]:
        """Ended in any case."""
        spawner = multiprocessing.get_context("spawn")
        here, there = spawner.Pipe()
        process = spawner.Process(
            target=_live, args=(case.config.model_dump(mode="json"), case.memory, core, there), daemon=True
        )
        process.start()
        there.close()
        try:
            yield cls(here)
        finally:
            process.kill()
            process.join()

    def wait_until_ready(self) -> None:
        """Until fragments are recorded, a replay buffer is full, and the first updates are over."""
        assert self._pipe.poll(_READY_SECONDS), f"the learner was not ready within {_READY_SECONDS:g} s"
        self._pipe.recv()

    def speed(self, seconds: float) -> float:
        """Env steps/s learned, over updates that take at least so long."""
        self._pipe.send(seconds)
        return float(self._pipe.recv())


def _live(given: dict[str, Any], memory: int, core: int, pipe: Connection) -> None:
    begin_on(core)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = parse_config(given)
    set_up_torch(config.trainer)
    description = check(config)
    learner = make_learner(config, description)
    needed = config.rollout.fragments_per_update
    endless = again_and_again(recorded(config, _UPDATES * needed))
    transitions = config.rollout.fragment_steps * config.environment.num_envs
    for _ in range(-(-memory // (needed * transitions))):
        taken = list(itertools.islice(endless, needed))
        learner.emulate_acting(taken, Phase.HEATUP)
        learner.learn(taken, Phase.HEATUP)

    def updates(seconds: float) -> float:
        began, done = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < seconds or not done:
            taken = list(itertools.islice(endless, needed))
            learner.emulate_acting(taken, Phase.TRAIN)
            learner.learn(taken, Phase.TRAIN)
            done += needed * transitions
        return done / passed

    updates(0.3)
    pipe.send("ready")
    while True:
        pipe.send(updates(pipe.recv()))


def again_and_again(fragments: list[Fragment]) -> Iterator[Fragment]:
    """Each time with a place of its own in the log, as if it were another one."""
    for number, item in enumerate(itertools.cycle(fragments)):
        yield replace(item, columns={name: dict(columns) for name, columns in item.columns.items()},
                      position=f"{number + 1}-0")  # fmt: skip


def recorded(config: Config, count: int) -> list[Fragment]:
    """So many fragments in a row, acted with the untrained policy, encoded and decoded."""
    torch.set_num_threads(config.trainer.torch_threads)
    description, rollout = check(config), config.rollout
    algorithm = config.algorithm.resolved()
    policies = build_policies(description.policies, config.policies, algorithm, config.seed)
    sampler = Sampler(make_vector(config.environment, description), description, SeedLineage(config.seed, 0, 0, 0))
    exploration = dict.fromkeys(policies, make_exploration(algorithm.acting, PhaseCounters().train))
    found = []
    for seq in range(count):
        sample = sampler.sample(policies, exploration, rollout.fragment_steps)
        header = FragmentHeader(
            run_id="alone", worker_id="worker-0", incarnation=0, seq=seq, phase=Phase.TRAIN,
            policy_versions=dict.fromkeys(policies, 0), steps=rollout.fragment_steps,
            num_envs=config.environment.num_envs, episodes=sample.episodes,
        )  # fmt: skip
        found.append(fragment.decode(fragment.encode(Fragment(header, sample.columns), rollout.compression)))
    sampler.close()
    return found
