"""Does the whole run as fast as the slower of its two sides would alone? `python -m benchmarks end-to-end`.

Acting alone: the real worker with a real Redis and store, and a trainer that consumes and publishes but learns nothing.
Learning alone: the real learner, fed with recorded fragments. End to end: a real run with one worker. The trainer (or
the learner) has one core, everything else another one. All three are there at once and take turns: who is not measured
stands still, so that a repeat takes seconds and noise meets all three alike.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.kit.measure import Measure, Result
from benchmarks.kit.options import Options
from benchmarks.suite.end_to_end_cases import Case, cases
from benchmarks.suite.learning_alone import LearningAlone
from benchmarks.suite.lone_run import LoneRun, act, consume
from benchmarks.suite.pinning import RAY_NICENESS, Cores, go_on, on_cores, pin, stand_still, two_cores
from benchmarks.suite.real_runs import one_ray, real_run, speed, wait_for_first_versions
from benchmarks.usage import processor_seconds
from stagecoach.coordinator.run_access.run import Run
from stagecoach.shared.protocol.flow_control import Flow, FlowState
from stagecoach.shared.protocol.heartbeat import Beat, Wait, poll, read_heartbeats
from stagecoach.shared.runtime.run_context import RunContext

_AIM = 0.95
_START_SECONDS = 300.0
_WORTH_TELLING = 0.005
_POLL_SECONDS = 0.005
QUESTION = (
    "Env steps/s of a run end to end, against the slower of acting alone and learning alone on the same cores; where a "
    "policy may not lag, against one after the other, 1/(1/acting + 1/learning). One core is the trainer's, another "
    "one has everything else: the worker, Redis, the store, Ray, the coordinator, the evaluator."
)


@dataclass(frozen=True)
class Windows:
    """For how long each is looked at, in seconds."""

    acting: float = 2.0
    learning: float = 2.0
    whole: float = 4.0


@dataclass
class Found:
    """The samples of one case, env steps/s, and where the time of the run went."""

    acting: list[float] = field(default_factory=list)
    learning: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Role → for how long it was looked at, end to end."""
    processor: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Role → processor time meanwhile."""
    stages: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    """Role and stage → seconds in it meanwhile."""

    def remarks(self, case: Case) -> list[str]:
        """Where the time of each role went while the run was looked at."""
        found = []
        for role in sorted(self.seconds):
            shares = {stage: spent / self.seconds[role] for (its, stage), spent in self.stages.items() if its == role}
            most = sorted(((share, stage) for stage, share in shares.items() if share >= _WORTH_TELLING), reverse=True)
            text = ", ".join(f"{stage} {share:.0%}" for share, stage in most)
            used = self.processor[role] / self.seconds[role]
            found.append(f"{case.name}, end to end, the {role}: {text}; processor time {used:.0%}")
        return found


def measure(options: Options) -> Result:
    """All cases, one after the other; in each, the three take turns."""
    cores = two_cores()
    windows = Windows(0.3, 0.3, 0.3) if options.quick else Windows()
    measures: list[Measure] = []
    remarks = [] if cores.apart else ["This machine lends one core only: both sides share it, so no aim can be met."]
    wanted = [case for case in cases() if options.wants(case.name)]
    with on_cores(cores.others), one_ray():
        for case in wanted:
            found = _measured(case, cores, windows, options)
            measures += _lines(case, found)
            remarks += found.remarks(case)
    settings = {
        "cores": vars(cores), "torch threads": 1, "niceness of all roles": RAY_NICENESS,
        "windows in seconds": vars(windows),
        "learning rate": "1e-12: the same work, but the policy stays, and so do the episodes' lengths",
        "images": "84×84 frames of benchmarks/suite/environments.py, four stacked; each is sent once",
        "cases": {case.name: case.settings for case in wanted},
    }  # fmt: skip
    return Result("end-to-end", QUESTION, measures, settings, remarks=remarks)


def _lines(case: Case, found: Found) -> list[Measure]:
    unit, both = "env steps/s", zip(found.acting, found.learning, strict=True)
    if case.overlaps:
        name, bound = "the slower of both alone", [min(pair) for pair in both]
    else:
        name, bound = "one after the other", [1 / (1 / acting + 1 / learning) for acting, learning in both]
    return [
        Measure(f"{case.name}, acting alone", unit, found.acting),
        Measure(f"{case.name}, learning alone", unit, found.learning),
        Measure(f"{case.name}, {name}", unit, bound),
        Measure(f"{case.name}, end to end", unit, found.whole, against=f"{case.name}, {name}", aim=_AIM),
    ]


def _measured(case: Case, cores: Cores, windows: Windows, options: Options) -> Found:
    found = Found()
    with ExitStack() as running:
        learning = running.enter_context(LearningAlone.open(case, cores.trainer))
        alone = running.enter_context(_acting_alone(case, cores))
        stand_still(alone.pids)
        whole = running.enter_context(WholeRun.open(case, cores))
        whole.wait_until_steady()
        stand_still(whole.pids)
        learning.wait_until_ready()
        for repeat in range(options.repeats):
            go_on(alone.pids)
            found.acting.append(speed(alone.role.flow, case.config, windows.acting))
            stand_still(alone.pids)
            alone.refuse_losses()
            found.learning.append(learning.speed(windows.learning))
            whole.go_on()
            found.whole.append(whole.speed(windows.whole, found))
            stand_still(whole.pids)
            latest = found.acting[-1], found.learning[-1], found.whole[-1]
            options.tell("{}, round {}: acting {:,.0f}, learning {:,.0f}, end to end {:,.0f}".format(
                case.name, repeat + 1, *latest))  # fmt: skip
    return found


@contextmanager
def _acting_alone(case: Case, cores: Cores) -> Iterator[LoneRun]:
    """A worker at work for a trainer that does not learn; a version ahead of it, for else it would wait for it, too."""
    rollout = case.config.rollout.model_copy(update={"max_policy_lag": max(1, case.config.rollout.max_policy_lag)})
    with LoneRun.open(case.config.model_copy(update={"rollout": rollout})) as alone:
        alone.spawn(consume, cores.trainer)
        alone.spawn(act, cores.others)
        flow = alone.role.flow

        def acts() -> bool:
            alone.refuse_losses()
            return flow.read().version >= 3

        poll(Wait("acting alone to begin", _START_SECONDS), acts)
        try:
            yield alone
        finally:
            go_on(alone.pids)


class WholeRun:
    """The real run, with its processes known by their heartbeats."""

    def __init__(self, case: Case, run: Run, role: RunContext, cores: Cores) -> None:
        self._case, self._run, self._role, self._cores = case, run, role, cores
        self._named: dict[str, int] = {}

    @classmethod
    @contextmanager
    def open(cls, case: Case, cores: Cores) -> Iterator[WholeRun]:
        """Started, and ended in any case."""
        with ExitStack() as running:
            folder = Path(running.enter_context(TemporaryDirectory(prefix="end-to-end-")))
            run, role = running.enter_context(real_run(case.config.model_copy(update={"runs_dir": folder})))
            made = cls(case, run, role, cores)
            running.callback(lambda: go_on(made.pids))
            yield made

    @property
    def pids(self) -> list[int]:
        """Of trainer and worker."""
        return list(self._named.values())

    def wait_until_steady(self) -> None:
        """Until its processes are pinned, and what fills up (a replay buffer) is full."""
        flow, config = self._role.flow, self._case.config
        wait_for_first_versions(self._run, flow)
        for beat in read_heartbeats(self._role.redis, self._run.run_id):
            if beat.role in ("trainer", "worker"):
                self._named[beat.role] = beat.pid
        pin(self._named["trainer"], self._cores.trainer)
        pin(self._named["worker"], self._cores.others)
        fragments = self._case.memory / (config.rollout.fragment_steps * config.environment.num_envs)
        poll(Wait("the memory to fill", _START_SECONDS), lambda: self._state(flow).consumed >= fragments)

    def speed(self, seconds: float, found: Found) -> float:
        """Env steps/s, between two publications so long apart; notes where the time went."""
        before, used = self._beats(), {role: processor_seconds(pid) or 0.0 for role, pid in self._named.items()}
        began = time.monotonic()
        found_speed = speed(self._role.flow, self._case.config, seconds)
        passed, after = time.monotonic() - began, self._beats()
        for role, pid in self._named.items():
            beats = float(after[role].stamp) - float(before[role].stamp)
            share = passed / beats if beats else 0.0  # a beat is up to a second old
            found.seconds[role] += passed
            found.processor[role] += (processor_seconds(pid) or 0.0) - used[role]
            for stage, spent in after[role].stages.items():
                found.stages[role, stage] += (spent - before[role].stages.get(stage, 0.0)) * share
        return found_speed

    def go_on(self) -> None:
        """Trainer and worker; returns once both beat again, since stages go on while their process stands still."""
        before = self._beats()
        go_on(self.pids)
        poll(Wait("the run to go on", _START_SECONDS), lambda: self._all_later(before), _POLL_SECONDS)

    def _all_later(self, before: dict[str, Beat]) -> bool:
        return all(beat.stamp != before[role].stamp for role, beat in self._beats().items())

    def _beats(self) -> dict[str, Beat]:
        beats = read_heartbeats(self._role.redis, self._run.run_id)
        return {beat.role: beat for beat in beats if beat.role in self._named}

    def _state(self, flow: Flow) -> FlowState:
        if self._run.ended:
            raise RuntimeError(f"the run has ended: {self._run.wait(1.0).reason}")
        return flow.read()
