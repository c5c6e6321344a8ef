"""A crowd: many rollout workers in one process, with recorded fragments in place of environments.

Each is the product's own `Worker` with its own Redis connections: it registers, loads its first policy, claims, fetches
policy versions, encodes, pushes, leaves its trace and beats. Only acting is a pause, after which a recording stands for
what was acted. Workers join, are drained, and die without a word.
"""

from __future__ import annotations

import contextlib
import logging
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from stagecoach.rollout_worker.acting_policies import ActingPolicies
from stagecoach.rollout_worker.environments.factory import make_vector
from stagecoach.rollout_worker.environments.seeding import SeedLineage
from stagecoach.rollout_worker.episodes import Episodes
from stagecoach.rollout_worker.exploration.base import Exploration, Sampling
from stagecoach.rollout_worker.sampling.action_trace import ActionTrace
from stagecoach.rollout_worker.sampling.director import Directors
from stagecoach.rollout_worker.sampling.sampler import Sample, Sampler
from stagecoach.rollout_worker.worker import StepResult, Worker
from stagecoach.shared.base.failure import RoleEnd
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.registry import build_policies
from stagecoach.shared.protocol.experience_log import ExperienceLog
from stagecoach.shared.protocol.flow_control import Claim, Flow, RunState
from stagecoach.shared.protocol.heartbeat import forget_heartbeat
from stagecoach.shared.protocol.redis_client import connect_redis
from stagecoach.shared.protocol.scripts import Call
from stagecoach.shared.runtime.launch import RoleLaunch
from stagecoach.shared.runtime.run_context import RunContext

_LOGGER = logging.getLogger("stagecoach.worker")
_TAKES = 8
"""Recorded fragments, so that the trainer does not learn from one and the same."""
_BACK_SECONDS = 2.0
"""Until a worker that died is back: what `python -m benchmarks recovery` measures."""
_POLL_SECONDS = 0.05
_TELL_SECONDS = 0.5
_JOIN_SECONDS = 60.0


class Died(BaseException):
    """This worker is gone, without a word to anybody."""


@dataclass(frozen=True)
class Plan:
    """What one crowd does."""

    launch: RoleLaunch
    name: str
    first: int
    stride: int
    """Its workers are numbered `first`, `first + stride` …, so that crowds need not agree."""
    workers: int
    think_seconds: float
    """How long a worker acts one fragment."""
    leave_per_second: float
    die_per_second: float
    seed: int


@dataclass
class Tally:
    """What a crowd did since it told last."""

    counts: Counter[str] = field(default_factory=Counter)
    produced: Counter[str] = field(default_factory=Counter)
    """Worker → fragments whose push was answered."""
    waits: list[float] = field(default_factory=list)
    """Seconds of each wait for credit (room, memory)."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, produced: str | None = None, waited: float | None = None, **counts: int) -> None:
        """From any thread."""
        with self.lock:
            self.counts.update(counts)
            if produced is not None:
                self.produced[produced] += 1
            if waited is not None:
                self.waits.append(waited)

    def take(self) -> tuple[Counter[str], Counter[str], list[float]]:
        """All of it; the next one begins at nothing."""
        with self.lock:
            taken = self.counts, self.produced, self.waits
            self.counts, self.produced, self.waits = Counter(), Counter(), []
        return taken


@dataclass(frozen=True)
class Take:
    """One fragment that was really acted, and its part of the action trace."""

    sample: Sample
    step: ActionTrace


def record(role: RunContext) -> list[Take]:
    """Acts some fragments with the run's environment and an untrained policy."""
    description = role.description()
    policies = build_policies(description.policies, role.config.policies, role.config.algorithm, seed=0)
    sampler = Sampler(
        make_vector(role.config.environment, description), description, SeedLineage(role.config.seed, 0, 0, 0)
    )
    takes = []
    for _ in range(_TAKES):
        sample = sampler.sample(policies, dict.fromkeys(policies, Sampling()), role.config.rollout.fragment_steps)
        step = sampler.traced(sample)
        assert step is not None
        takes.append(Take(sample, step))
    sampler.close()
    return takes


class Playback(Sampler):
    """A sampler whose environments are recordings."""

    def __init__(self, takes: list[Take], think_seconds: float, lineage: SeedLineage, dies: threading.Event) -> None:
        self._takes, self._think, self._dies = takes, think_seconds, dies
        self.lineage = lineage
        self._number, self.directors = 0, Directors()

    def sample(self, policies: Mapping[str, Policy], exploration: Mapping[str, Exploration], steps: int) -> Sample:
        """Takes as long as acting does; raises `Died` at the moment of death, with the claim in hand."""
        if self._dies.wait(self._think):
            raise Died
        self._number += 1
        return self._take.sample

    def traced(self, sample: Sample) -> ActionTrace:
        """As recorded, in this lineage."""
        return replace(self._take.step, lineage=self.lineage, number=self._number - 1)

    def close(self) -> None:
        """There is nothing to end."""

    @property
    def _take(self) -> Take:
        return self._takes[(self.lineage.worker + self._number) % len(self._takes)]


class WatchedFlow(Flow):
    """Counts claims, and dies while it waits where that is due."""

    def __init__(self, role: RunContext, tally: Tally, dies: threading.Event) -> None:
        super().__init__(role.redis, role.run_id)
        self._tally, self._dies = tally, dies

    def claiming(self, worker: str, incarnation: int, seq: int) -> Call[Claim]:
        """As ever; the answer is counted."""
        call = super().claiming(worker, incarnation, seq)
        read = call.read

        def counted(answer: Any) -> Claim:
            claim = read(answer)
            self._tally.add(claims=1, granted=int(claim.granted), refused=int(claim.waiting))
            return claim

        call.read = counted
        return call

    def wait_for_wakeup(self, claim: Claim, seconds: float) -> None:
        """As ever; raises `Died`."""
        super().wait_for_wakeup(claim, seconds)
        self._tally.add(wakeups=1)
        if self._dies.is_set():
            raise Died


class RecordedEpisodes(Episodes):
    """Plays the same recordings again and again; nothing of it can fail."""

    def __init__(self, playback: Playback, log: ExperienceLog, worker: str) -> None:
        self.sampler = playback
        self._log, self._worker, self._tried = log, worker, False

    def enter(self, phase: Phase) -> None:
        """There is nothing but recordings."""

    def pushed(self) -> None:
        """No failures are counted."""


class SimulatedWorker(Worker):
    """The product's worker, with recordings; it can be made to die."""

    def __init__(self, role: RunContext, index: int, takes: list[Take], think_seconds: float, tally: Tally) -> None:
        self.dies = threading.Event()
        self._takes, self._think, self._tally = takes, think_seconds, tally
        super().__init__(replace(role, flow=WatchedFlow(role, tally, self.dies)), index)

    def live(self) -> None:
        """A thread's whole life."""
        try:
            reason = self.run()
            self._tally.add(left=int(reason == RoleEnd.DRAINED))
        except Died:
            self._tally.add(died=1)
        except Exception:
            _LOGGER.exception("%s failed", self.id)
            self._tally.add(failed=1)
        finally:
            self.context.redis.close()

    def stop(self, reason: str) -> None:
        """In order; or lost, where it has died."""
        if self.dies.is_set():
            self._watchdog.stop()
            self.heartbeat.stop(reason, last_beat=False)
        else:
            super().stop(reason)

    def step(self, wait_seconds: float) -> StepResult | RoleEnd:
        result = super().step(wait_seconds)
        if result == StepResult.PUSHED:
            self._tally.add(produced=self.id)
        return result

    def claim(self, wait_seconds: float) -> Claim:
        started = time.monotonic()
        claim = super().claim(wait_seconds)
        self._tally.add(waited=time.monotonic() - started)
        return claim

    def open_policies(self, description: EnvironmentDescription) -> ActingPolicies:
        policies = super().open_policies(description)
        fetch = policies.fetch

        def counted(at_least: int) -> bool:
            self._tally.add(fetches=1)
            return fetch(at_least)

        policies.fetch = counted  # type: ignore[method-assign]
        return policies

    def open_episodes(self, *opened: Any) -> Episodes:
        left = self._log.left(self.id)  # read, as by any successor; recordings have nothing to take up
        self._tally.add(joined=1, joined_again=int(left.pushed))
        lineage = SeedLineage(self._config.seed, self._index, self.incarnation, 0)
        return RecordedEpisodes(Playback(self._takes, self._think, lineage, self.dies), self._log, self.id)


class Crowd:
    """Keeps its workers at their number, while some leave and some die."""

    def __init__(self, plan: Plan, role: RunContext) -> None:
        self._plan, self._role = plan, role
        self._takes = record(role)
        self._random = random.Random(plan.seed)
        self._tally = Tally()
        self._workers: dict[int, tuple[SimulatedWorker, threading.Thread]] = {}
        self._back: dict[int, float] = {}
        """Number → when its successor starts."""
        self._lost: set[int] = set()
        """Numbers whose machines are gone: what they held is not given back."""
        self._churns = False

    def run(self, pipe: Connection) -> None:
        """Until the other end says `end` and all workers have ended; `churn` begins the leaving and dying."""
        told, ending, deadline = time.monotonic(), False, 0.0
        while not ending or (self._workers and time.monotonic() < deadline):
            if pipe.poll(_POLL_SECONDS):
                word = pipe.recv()
                self._churns = word == "churn"
                if word == "end":
                    ending, deadline = True, time.monotonic() + _JOIN_SECONDS
            self._tend(ending)
            if time.monotonic() - told > _TELL_SECONDS:
                told = time.monotonic()
                pipe.send(self._tally.take())
        pipe.send(self._tally.take())

    def _tend(self, ending: bool) -> None:
        """One turn: who has ended, who is missing, who leaves and who dies."""
        for index, (worker, thread) in list(self._workers.items()):
            if not thread.is_alive():
                self._ended(index, worker)
        if ending:
            return
        index = self._plan.first
        while len(self._workers) + len(self._back) < self._plan.workers:
            if index not in self._workers and index not in self._back and index not in self._lost:
                self._start(index)
            index += self._plan.stride
        for index in [index for index, due in self._back.items() if due < time.monotonic()]:
            del self._back[index]
            self._start(index)
        if self._churns and self._workers:
            self._churn()

    def _start(self, index: int) -> None:
        config, address = self._role.config, self._role.address
        role = replace(self._role, redis=connect_redis(address, config, "worker"))
        self._role.flow.undrain(f"worker-{index}")
        worker = SimulatedWorker(role, index, self._takes, self._plan.think_seconds, self._tally)
        thread = threading.Thread(target=worker.live, name=worker.id, daemon=True)
        self._workers[index] = worker, thread
        thread.start()

    def _ended(self, index: int, worker: SimulatedWorker) -> None:
        """What Ray and the fleet do: replace who died, tidy up after who was drained."""
        del self._workers[index]
        if worker.dies.is_set():
            if self._random.random() < 0.5:
                self._back[index] = time.monotonic() + _BACK_SECONDS
            else:
                self._lost.add(index)
            return
        self._role.flow.release(worker.id)
        forget_heartbeat(self._role.redis, self._role.run_id, "worker", worker.id)

    def _churn(self) -> None:
        if self._random.random() < self._plan.leave_per_second * _POLL_SECONDS:
            worker, _ = self._random.choice(list(self._workers.values()))
            self._role.flow.drain(worker.id)
        if self._random.random() < self._plan.die_per_second * _POLL_SECONDS:
            worker, _ = self._random.choice(list(self._workers.values()))
            worker.dies.set()


def simulate(launch: RoleLaunch, first: int, stride: int, workers: int, think: float) -> None:
    """A process's whole life where no worker leaves or dies and none is asked how far it is: it ends with the run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    plan = Plan(launch, f"worker-crowd-{first}", first, stride, workers, think, 0.0, 0.0, 0)
    role = launch.open(plan.name)
    here, there = Pipe()

    def listen() -> None:
        running = True
        with contextlib.suppress(EOFError, OSError):  # the crowd has ended
            while True:
                while here.poll(_TELL_SECONDS):
                    here.recv()
                if running and role.flow.read().state is not RunState.RUNNING:
                    running = False
                    here.send("end")

    threading.Thread(target=listen, daemon=True).start()
    Crowd(plan, role).run(there)


def crowd(plan: Plan, pipe: Connection) -> None:
    """A process's whole life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Crowd(plan, plan.launch.open(plan.name)).run(pipe)
