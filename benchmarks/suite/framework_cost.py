"""What the framework costs per transition beside environment, policy and gradient, in the real loop of real processes.

A worker and a trainer run as they always do, with Redis and a store; in each, the calls of the environment, the policy
and the gradient are clocked by the thread's processor time, and the rest of the whole process's is the framework.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any

import gymnasium as gym

from benchmarks.kit.options import Options
from benchmarks.suite.limits_alone import cartpole
from benchmarks.suite.lone_run import LoneRun
from benchmarks.suite.pinning import on_cores, two_cores
from stagecoach.rollout_worker.acting_policies import ActingPolicies
from stagecoach.rollout_worker.environments.gymnasium_env import GuardedEnvironment
from stagecoach.rollout_worker.exploration.base import Exploration
from stagecoach.rollout_worker.sampling.small_networks import SmallNetwork
from stagecoach.rollout_worker.worker import StepResult, Worker
from stagecoach.shared.base.failure import RoleEnd
from stagecoach.shared.runtime.launch import RoleLaunch
from stagecoach.trainer_node.recovery.incarnation import Incarnation
from stagecoach.trainer_node.trainer import StepResult as TrainerStep
from stagecoach.trainer_node.trainer import Trainer

FRAMEWORK = "framework"
ENVIRONMENT, POLICY = "environment: gymnasium's vector step and reset", "policy: forward, draw, log-probabilities"
GRADIENT = "gradient: loss, backward, clipping, optimizer"
FORWARD = "values before the update"
ALGORITHM = "the rest of the update: advantages, minibatches, figures"
GUARD = "guards around the environments (in framework)"
CLOCKS = "what these clocks take (in the others)"
WORKER_PARTS, TRAINER_PARTS = (ENVIRONMENT, POLICY, GUARD, CLOCKS), (GRADIENT, FORWARD, ALGORITHM, CLOCKS)
_STRETCH_SECONDS, _QUICK_SECONDS = 3.0, 0.3
_WAIT_SECONDS = 300.0
_CALIBRATION = 20_000

Sample = dict[str, float]
"""Part → µs per transition."""


@dataclass
class FrameworkCost:
    """The samples of one run."""

    samples: dict[str, list[Sample]]

    def of(self, who: str) -> list[Sample]:
        """Of `worker` or `trainer`, a sample for each repeat."""
        return self.samples[who]

    @classmethod
    def of_run(cls, options: Options) -> FrameworkCost:
        """One run; after a stretch that does not count, each stretch is a repeat. Worker and trainer have a core each.

        Raises `RuntimeError` where one of them fails.
        """
        cores, pipes = two_cores(), {}
        seconds = _QUICK_SECONDS if options.quick else _STRETCH_SECONDS
        lives: list[tuple[str, Callable[..., None], int]] = [
            ("trainer", _train, cores.trainer), ("worker", _act, cores.others)
        ]  # fmt: skip
        with on_cores(cores.others), LoneRun.open(cartpole(options.quick)) as run:
            for who, life, core in lives:
                pipes[who], there = multiprocessing.get_context("spawn").Pipe(duplex=False)
                run.spawn(life, core, there, seconds)
                there.close()
            found = {who: [_next(run, pipe) for _ in range(options.repeats + 1)][1:] for who, pipe in pipes.items()}
        return cls(found)


def _next(run: LoneRun, pipe: Connection) -> Sample:
    deadline = time.monotonic() + _WAIT_SECONDS
    while not pipe.poll(0.2):
        run.refuse_losses()
        if time.monotonic() > deadline:
            raise RuntimeError(f"no stretch was over within {_WAIT_SECONDS:g} s")
    found: Sample = pipe.recv()
    return found


class Clock:
    """Clocks calls by the processor time of their thread; of calls within calls, the outermost one."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls = 0
        self._within = False

    def around(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, clocked as `part`."""

        def clocked(*arguments: Any, **named: Any) -> Any:
            if self._within:
                return call(*arguments, **named)
            self._within, began = True, time.thread_time()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds[part] += time.thread_time() - began
                self.calls += 1
                self._within = False

        return clocked

    def inner(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, clocked as `part` without what is clocked within it."""

        def clocked(*arguments: Any, **named: Any) -> Any:
            before, began = sum(self.seconds.values()), time.thread_time()
            try:
                return call(*arguments, **named)
            finally:
                took = time.thread_time() - began
                self.seconds[part] += took - (sum(self.seconds.values()) - before)
                self.calls += 1

        return clocked


class Stretches:
    """Sends a sample each time that a stretch is over."""

    def __init__(self, clock: Clock, pipe: Connection, seconds: float, framework: Callable[[Sample], float]) -> None:
        self._clock, self._pipe, self._seconds, self._framework = clock, pipe, seconds, framework
        self._each = _seconds_of_clocking()
        self._begin()

    def _begin(self) -> None:
        self._began, self._process, self._transitions = time.monotonic(), time.process_time(), 0
        self._parts, self._calls = dict(self._clock.seconds), self._clock.calls

    def passed(self, transitions: int) -> None:
        """So many more have gone through."""
        self._transitions += transitions
        if time.monotonic() - self._began < self._seconds:
            return
        used, per = time.process_time() - self._process, 1e6 / self._transitions
        sample = {part: (now - self._parts.get(part, 0.0)) * per for part, now in self._clock.seconds.items()}
        beside = used * per - sum(sample.values())
        sample[CLOCKS] = (self._clock.calls - self._calls) * self._each * per
        sample[FRAMEWORK] = beside + self._framework(sample)
        self._pipe.send(sample)
        self._begin()


class ClockedWorker(Worker):
    """The real one, with clocks on gymnasium's vector environment and on the policy."""

    def clock(self, pipe: Connection, seconds: float) -> None:
        """To be called before it runs."""
        self._clock, self._to = Clock(), (pipe, seconds)

    def start(self) -> None:
        super().start()
        inner: Any = self.episodes.sampler
        vector: gym.vector.VectorEnv[Any, Any, Any] = inner._environment._environment._env
        for name in ("step", "reset"):
            setattr(vector, name, self._clock.around(ENVIRONMENT, getattr(vector, name)))
        guard = 1e6 * _seconds_of_guard()

        def framework(sample: Sample) -> float:
            sample[GUARD] = guard
            return guard

        self._stretches = Stretches(self._clock, *self._to, framework)

    def step(self, wait_seconds: float) -> StepResult | RoleEnd:
        result = super().step(wait_seconds)
        if result == StepResult.PUSHED:
            self._stretches.passed(self._config.rollout.fragment_steps * self._config.environment.num_envs)
        return result

    @cached_property
    def policies(self) -> ActingPolicies:
        policies = super().policies
        explore = policies.exploration

        def clocked() -> dict[str, Exploration]:
            made = explore()
            for its in made.values():
                for name in ("act", "log_prob"):
                    setattr(its, name, self._clock.around(POLICY, getattr(its, name)))
            return made

        policies.exploration = clocked  # type: ignore[method-assign]
        for name in ("of", "act"):
            setattr(SmallNetwork, name, self._clock.around(POLICY, getattr(SmallNetwork, name)))
        return policies


class ClockedTrainer(Trainer):
    """The real one, with clocks on what an update consists of."""

    def clock(self, pipe: Connection, seconds: float) -> None:
        """To be called before it runs."""
        self._clock = Clock()
        (algorithm,) = self.learner.algorithms.values()
        parts: Any = algorithm
        for name in ("loss", "_gradient_step"):
            setattr(parts, name, self._clock.around(GRADIENT, getattr(parts, name)))
        for name in ("value", "action_parameters_and_value"):
            setattr(parts.policy, name, self._clock.around(FORWARD, getattr(parts.policy, name)))
        parts.update = self._clock.inner(ALGORITHM, parts.update)
        self._stretches = Stretches(self._clock, pipe, seconds, lambda sample: 0.0)

    def step(self, wait_seconds: float) -> TrainerStep:
        word = super().step(wait_seconds)
        if word is TrainerStep.UPDATED:
            self._stretches.passed(self._config.transitions_per_update)
        return word


def _act(launch: RoleLaunch, pipe: Connection, seconds: float) -> None:
    worker = ClockedWorker(launch.open("worker-0"), 0)
    worker.clock(pipe, seconds)
    worker.run()


def _train(launch: RoleLaunch, pipe: Connection, seconds: float) -> None:
    trainer = ClockedTrainer.start(Incarnation(launch.open("trainer")))
    trainer.clock(pipe, seconds)
    trainer.run()


def _nothing() -> None:
    pass


def _seconds_of_clocking() -> float:
    """What one clocked call takes more than one that is not."""
    return _each(Clock().around("", _nothing)) - _each(_nothing)


class _Still(gym.Env[Any, Any]):
    """Does nothing."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return None, 0.0, False, False, {}


def _seconds_of_guard() -> float:
    """What the guard around one environment takes in one step."""
    bare, guarded = _Still(), GuardedEnvironment(_Still(), 0)
    return _each(lambda: guarded.step(0)) - _each(lambda: bare.step(0))


def _each(call: Callable[[], Any]) -> float:
    began = time.thread_time()
    for _ in range(_CALIBRATION):
        call()
    return (time.thread_time() - began) / _CALIBRATION
