"""A simulated run: the product's fleet, workers, trainer and evaluator, each a simulated process.

What is not the product's: the scheduler, Redis, the store, Ray, and the environment, which counts.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from redis import RedisError

from stagecoach.coordinator.catalog.checkpoint_operations import prune_checkpoints
from stagecoach.coordinator.fleet import fleet
from stagecoach.coordinator.lifecycle import run_lease
from stagecoach.coordinator.lifecycle.preparation import prepare_new, prepare_resume
from stagecoach.coordinator.lifecycle.run_lease import RunLease
from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.rollout_worker.evaluator import Evaluator
from stagecoach.rollout_worker.watchdog import Watchdog
from stagecoach.rollout_worker.worker import Worker
from stagecoach.shared.base import world
from stagecoach.shared.base.address import Address, RoleName
from stagecoach.shared.base.errors import CheckpointNotFound, Fenced, StagecoachError
from stagecoach.shared.base.failure import EndReason, RunEnd
from stagecoach.shared.config.rollout import MIN_LOG_BYTES
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.protocol.flow_control import Flow
from stagecoach.shared.protocol.payload_shards import Bodies
from stagecoach.shared.protocol.redis_client import connect_redis, shard_clients
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.shared.storage.checkpoint_store import CheckpointStore
from stagecoach.trainer_node.process import run_trainer
from stagecoach.trainer_node.recovery.incarnation import Incarnation
from stagecoach.trainer_node.trainer import Trainer
from tests.conftest import minimal_config
from tests.simulation.memory import Memory, for_all_bodies
from tests.simulation.network import Server, connected
from tests.simulation.ray_model import RayModel, simulated_ray
from tests.simulation.redis_model import Keys, RedisModel
from tests.simulation.scheduler import BEGAN, Killed, Process, Scheduler, installed
from tests.simulation.store import Bucket, Store
from tests.support.environments.small import CHASE_POLICIES, Chase

RUN = "simulated"
_PATH = "/simulated"
_ADDRESS = Address(RUN, f"unix://{_PATH}", "file:///simulated")
_HEAD: Any = SimpleNamespace(
    embedded=True, generation=0, failure="", lost=lambda *_, **__: False, zygote=SimpleNamespace(token="")
)
_LAUNCH: Any = SimpleNamespace(encoded=lambda: b"")
_EPISODE = 5
"""Steps of an episode."""
_LESSONS = [
    {"choice": [2, 3], "until": {"success": 0.5, "episodes": 6}},
    {"choice": [4, 5], "until": {"success": 0.8, "episodes": 6}, "back": {"success": 0.5, "episodes": 6}},
    {"choice": [3]},
]


class Counting(gymnasium.Env[Any, Any]):
    """Shows how many steps its episode has; its reward depends on the action and on its seed."""

    reset_options = ("length",)

    def __init__(self, pace: float = 0.0) -> None:
        self._pace = pace
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._steps, self._start, self._length = 0, 0.0, _EPISODE

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps, self._start = 0, float(self.np_random.random())
        self._length = int((options or {}).get("length", _EPISODE))
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        if self._pace:
            world.sleep(self._pace)
        over = self._steps >= self._length
        told = {"is_success": self._start < 0.7} if over else {}
        return self._shown(), float(action) + self._start, over, False, told

    def _shown(self) -> Any:
        return np.array([self._steps / _EPISODE, self._start], np.float32)


gymnasium.register("Counting-v0", "tests.simulation.run:Counting")


class PacedChase(Chase):
    """A game of two, for leagues."""

    def __init__(self, pace: float = 0.0) -> None:
        super().__init__(cat_steps=3, mouse_steps=5, counts=False)
        self._pace = pace

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        if self._pace:
            world.sleep(self._pace)
        return super().step(actions)


_LEAGUE: dict[str, Any] = {
    "learners": {"cat": {"policy": "hunter", "reset": {"or_after": "20 episodes"}}, "mouse": {"policy": "prey"}},
    "snapshot": {"every": "6 episodes", "min_games": 3}, "players": 4,
    "opponents": {"latest": 0.5, "past": {"share": 0.5, "choose": "pfsp", "window": 3}},
}  # fmt: skip
_REPLAY: dict[str, dict[str, Any]] = {
    "dqn": {"name": "dqn", "replay_buffer": {"capacity": 64}},
    "prioritized dqn": {"name": "dqn", "replay_buffer": {"kind": "prioritized", "capacity": 64}},
}
_ALGORITHMS = "impala", "impala", "impala", *_REPLAY, "league"


@dataclass(frozen=True)
class Setting:
    workers: int = 2
    fragments_per_update: int = 2
    max_policy_lag: int = 1
    algorithm: str = "impala"
    """Or one of `_REPLAY`, or `league`: IMPALA for two that play against each other."""
    archive: bool = True
    evaluator: bool = False
    shards: int = 0
    shared_memory: bool = False
    curriculum: bool = False
    pace: float = 0.1
    """Seconds that a step of the environment takes."""
    transport: str = "redis"
    """Transport of policy versions."""
    evaluated_every: str | None = None
    small_log: bool = False

    @classmethod
    def drawn(cls, draw: random.Random) -> Setting:
        batch = draw.choice((1, 1, 1, 2, 2, 3, 4, 8))
        return cls(
            workers=draw.choice((1, 1, 2, 2, 3, 5)), fragments_per_update=batch,
            max_policy_lag=draw.randint(0, 3), algorithm=draw.choice(_ALGORITHMS),
            archive=draw.random() < 0.6, evaluator=draw.random() < 0.3, shards=draw.choice((0, 0, 0, 1, 2)),
            shared_memory=draw.random() < 0.3, curriculum=draw.random() < 0.2,
            pace=draw.choice((0.1, 0.1, 0.5, 2.0)) if batch < 3 else 0.1,
            transport=draw.choice(("redis", "redis", "redis", "redis", "object_store")),
            evaluated_every=draw.choice((None, None, "4 updates")), small_log=draw.random() < 0.2,
        )  # fmt: skip

    @property
    def update_seconds(self) -> float:
        """Virtual seconds in which one worker acts what an update needs."""
        return 2 * self.fragments_per_update * self.pace

    @property
    def version_seconds(self) -> float:
        """Virtual seconds after which a version should follow another, when nothing is in its way."""
        return self.update_seconds + (15.0 if self.transport == "object_store" else 0.0)

    @property
    def window(self) -> int:
        return (self.max_policy_lag + 1) * self.fragments_per_update

    def config(self) -> Config:
        algorithm: dict[str, Any] = {"name": "impala"}
        if self.remembers:
            algorithm = _REPLAY[self.algorithm] | {"minibatch_size": 4, "gradient_steps_per_env_step": 0.25}
        environment: dict[str, Any] = {
            "id": "Counting-v0", "parameters": {"length": {"lessons": _LESSONS}} if self.curriculum else {},
        }  # fmt: skip
        others: dict[str, Any] = {"policies": {"default": {"hidden_sizes": [4]}}}
        if self.algorithm == "league":
            environment = {"api": "pettingzoo", "id": "tests.simulation.run:PacedChase"}
            others = CHASE_POLICIES | {"league": _LEAGUE}
        return minimal_config(
            environment=environment | {"num_envs": 1, "kwargs": {"pace": self.pace}},
            rollout={
                "workers": self.workers, "fragment_steps": 2, "fragments_per_update": self.fragments_per_update,
                "max_policy_lag": self.max_policy_lag, "lease_seconds": 10.0, "silent_seconds": 11.0,
                "restarts_allowed": 1000, **({"max_log_bytes": MIN_LOG_BYTES} if self.small_log else {}),
            },
            policy_versions={"transport": self.transport},
            algorithm=algorithm,
            heatup="8 env_steps" if self.remembers else "0 env_steps",
            checkpoint={"every": "3 updates", "keep_last": 2},
            archive="all" if self.archive else "off",
            evaluation={"episodes": 2, "every": self.evaluated_every} if self.evaluator else {"episodes": 0},
            redis={"url": _ADDRESS.redis_url, "shards": [f"redis://{name}:6379/0" for name in self.shard_names]},
            metrics={"writers": []},
            stop_at={"updates": 1_000_000},
            **others,
        )  # fmt: skip

    @property
    def remembers(self) -> bool:
        return self.algorithm in _REPLAY

    @property
    def shard_names(self) -> list[str]:
        return [f"shard-{number}" for number in range(self.shards)]


class SimulatedRun:
    """One run under one scheduler."""

    def __init__(self, scheduler: Scheduler, setting: Setting) -> None:
        self.scheduler, self.setting, self.config = scheduler, setting, setting.config()
        draw = scheduler.random
        self.run_id, self.clock_offset = RUN, 0.0
        """The second is that of the server's clock."""
        self.model = RedisModel(self._server_time, draw.randbytes(20).hex())
        self.server = Server(scheduler, self.model)
        self.shards = {
            name: Server(scheduler, RedisModel(self._server_time, name)) for name in self.setting.shard_names
        }
        self.bucket, self.memory = Bucket(scheduler), Memory()
        self.trainer_class: type[Trainer] = Trainer
        self.processes: dict[str, Process] = {}
        """Role → its newest process."""
        self.ended: list[tuple[str, object]] = []
        """Role, and how its process has ended."""
        self.failed: BaseException | None = None
        """An end that no fault explains."""
        self.over = False
        self.ray = RayModel(scheduler, self.start)
        self.redis_restarts, self.bodies_lost = 0, False
        self.lost = set[tuple[int, int]]()
        """Positions of log entries that Redis has lost."""
        self._stops = 0
        """Orders to stop that may still reach the run."""
        self._stopped = False
        """Whether it was stopped once."""
        self.stop_ordered, self._resumes, self.prunes, self.pruned = False, False, False, False
        """The last two: whether a person prunes checkpoints before the next resume, and whether one has."""
        self.ends = False
        """Whether nobody resumes it after it was stopped."""
        self.when_started: dict[str, Callable[[Process], object]] = {}
        """Role → what is done to its next process."""
        self.resume_error: BaseException | None = None
        self.images: list[tuple[float, Keys]] = []
        """What the server has written to its disk, or a replica has: when, and the keys."""

    # Starting

    def context(self, role: RoleName) -> RunContext:
        client = connect_redis(_ADDRESS, self.config, role)
        store = CheckpointStore(Store(self.bucket), RUN)
        memory = self.memory if self.setting.shared_memory else None
        bodies = Bodies(shard_clients(_ADDRESS, self.config, role), RUN, memory)
        return RunContext(self.config, _ADDRESS, client, store, Flow(client, RUN), bodies)

    def begin(self) -> None:
        """A person starts the run."""
        self._coordinate(lambda context: prepare_new(context, _environment(self.setting.algorithm)))
        self.scheduler.after(1.0, self._write_image)

    def _coordinate(self, prepare: Callable[[RunContext], None]) -> None:
        process = self.processes["coordinator"] = Process(self.scheduler, "coordinator")
        process.on_exit = self._coordinator_ended

        def main() -> RunEnd:
            context, abandoned = self.context("coordinator"), world.Event()
            lease = RunLease(context, abandoned.set)
            lease.take()
            lease.keep()
            try:
                prepare(context)
                lease.take()
                self.stop_ordered = False
                return fleet.Fleet(context, _LAUNCH, _HEAD, 0.0).run(abandoned)
            finally:
                lease.release()

        process.start(main)

    def _coordinator_ended(self, process: Process) -> None:
        if self.over:
            return
        for actor in self.ray.actors:  # a coordinator's end takes its Ray with it
            actor.kill()
        end, error = process.result, process.error
        ordered = self._stops > 0 or (self._stopped and self.redis_restarts > 0)  # an older Redis says so again
        stopped = error is None and end.reason == EndReason.STOPPED and ordered
        if not (stopped or isinstance(error, Killed) or (isinstance(error, StagecoachError) and self._resumes)):
            self.failed = error or AssertionError(f"the run ended as {end.reason!r}, which nobody has ordered")
        self._stops, self._stopped = self._stops - stopped, self._stopped or stopped
        if stopped and self.ends:
            self.over = True
            return
        self.resume_error, self._resumes = error, True
        self.scheduler.after(self.scheduler.random.uniform(0.5, 4.0), partial(self._coordinate, self._prepare_resume))

    def _prepare_resume(self, context: RunContext) -> None:
        """A resume may be refused, while the store is away; then a person tries it again."""
        if self.prunes:
            self.prunes, self.pruned = False, True
            rule = self.config.checkpoint.model_copy(update={"keep_last": 1})
            with suppress(CheckpointNotFound):
                prune_checkpoints(context.checkpoints, rule, dry_run=False)
        prepare_resume(context)
        self._resumes = False

    def start(self, role: str) -> Process:
        process = self.processes[role] = Process(self.scheduler, role)
        process.on_exit = self._ended
        main = {"trainer": self._train, "worker": self._act, "evaluator": self._play}[role.partition("-")[0]]
        if (call := self.when_started.pop(role, None)) is not None:
            call(process)
        process.start(partial(main, process))
        return process

    def _train(self, process: Process) -> str:
        incarnation = Incarnation(self.context("trainer"))
        process.names_wait, process.terminate = lambda: incarnation.heartbeat.waits, incarnation.request_shutdown
        return run_trainer(incarnation, self.trainer_class)

    def _act(self, process: Process) -> str:
        worker = Worker(self.context("worker"), int(process.name.partition("-")[2]))
        process.names_wait, process.terminate = lambda: worker.heartbeat.waits, worker.request_shutdown
        return str(worker.run())

    def _play(self, process: Process) -> str:
        evaluator = Evaluator(self.context("evaluator"))
        process.names_wait, process.terminate = lambda: evaluator.heartbeat.waits, evaluator.request_shutdown
        return str(evaluator.run())

    def _ended(self, process: Process) -> None:
        self.ended.append((process.name, process.error if process.error is not None else process.result))
        if process.error is not None and not isinstance(process.error, Killed | Fenced) and not self.over:
            self.failed = self.failed or process.error

    def stop(self) -> None:
        """A person stops the run, which then is resumed."""
        self.stop_ordered = True
        self._stops += 1
        self.from_outside(lambda context: context.flow.order_stop())

    @property
    def epoch(self) -> int:
        """That of the newest trainer which Redis knows."""
        return int(self.model.keys.get(f"stagecoach:{{{RUN}}}:flow".encode(), {}).get(b"epoch", b"0"))

    def _write_image(self) -> None:
        """The server writes its file each second; a failover or a restart goes back to one of the last."""
        self.images = [*self.images[-3:], (self.scheduler.now, self.model.keys.copy())]
        self.scheduler.after(1.0, self._write_image)

    def _server_time(self) -> float:
        return BEGAN + self.scheduler.now + self.clock_offset

    def restart_redis(self, keys: Keys) -> None:
        """Redis is there again, as another process that has these keys."""
        self.redis_restarts += 1
        log = f"stagecoach:{{{RUN}}}:log".encode()
        before, after = (its[log].ids if log in its else () for its in (self.model.keys, keys))
        self.lost |= {*before} - {*after}
        self.model.restart(keys, self.scheduler.random.randbytes(20).hex())
        self.server.up = True

    def from_outside(self, order: Callable[[RunContext], object]) -> Process:
        """A person, or the coordinator, orders something of the run: a process of its own."""
        process = Process(self.scheduler, "order")
        process.on_exit = self._order_ended
        process.start(lambda: order(self.context("coordinator")))
        return process

    def _order_ended(self, process: Process) -> None:
        """What stands in its way is told to the person; anything else is a fault of the product."""
        if not isinstance(process.error, Killed | StagecoachError | RedisError | None):
            self.failed = process.error

    def kill_roles(self) -> None:
        for process in list(self.processes.values()):
            process.kill()

    def kill_all(self) -> None:
        self.over = True
        self.kill_roles()


@cache
def _environment(algorithm: str) -> EnvironmentDescription:
    return describe_environment(Setting(algorithm=algorithm).config())


@contextmanager
def simulated(seed: int, setting: Setting) -> Iterator[SimulatedRun]:
    """A run of this seed, which is about to begin; ends all its processes."""
    scheduler = Scheduler(seed)
    _environment(setting.algorithm)  # outside: it starts a real one
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(installed(scheduler))
        stack.enter_context(for_all_bodies())
        run = SimulatedRun(scheduler, setting)
        stack.enter_context(simulated_ray(run.ray))
        stack.enter_context(connected({_PATH: run.server, **run.shards}))
        stack.callback(run.kill_all)
        yield run


@contextmanager
def _quiet() -> Iterator[None]:
    """No logs, no watchdog (a hang is found by the scheduler), a fleet that looks less often, and coordinators that
    cannot see one another's processes."""
    disabled = logging.root.manager.disable
    logging.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Watchdog, "start", lambda self: None)
            patch.setattr(fleet, "POLL_SECONDS", 0.5)
            patch.setattr(run_lease, "_alive", lambda holder: None)
            yield
    finally:
        logging.disable(disabled)
