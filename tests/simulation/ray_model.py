"""Ray, as far as the fleet uses it: actors on one machine, whose processes start, end and die."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

from stagecoach.coordinator.fleet import capacity, fleet, managed_actor, worker_pool
from stagecoach.shared.base.errors import Fenced
from stagecoach.shared.base.failure import Failure
from stagecoach.shared.base.process import ExitDiagnostics
from stagecoach.shared.runtime.role_process import RoleExit
from tests.simulation.scheduler import Killed, Process, Scheduler, Task

_NODE = "the machine"
_CORES = 64.0


class Call:
    """The call of an actor's `run`."""

    def __init__(self) -> None:
        self.result: RoleExit | None = None
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        return self.result is not None or self.error is not None


class Actor:
    """An actor of a role, with one process after another."""

    def __init__(self, cluster: RayModel, name: str) -> None:
        self._cluster, self.name, self.alive = cluster, name, True
        self.run = SimpleNamespace(remote=self._run)
        self.process: Process | None = None
        self._call: Call | None = None

    def _run(self) -> Call:
        self._call = call = Call()
        if not self.alive:
            call.error = _dead()
        scheduler = self._cluster.scheduler
        scheduler.after(scheduler.random.uniform(0.2, 2.0), partial(self._begin, call))
        return call

    def _begin(self, call: Call) -> None:
        if not self.alive or self._call is not call:
            return
        self.process = self._cluster.start(self.name)
        ended = self.process.on_exit

        def on_exit(process: Process) -> None:
            ended(process)
            if not call.done:
                call.result = _exit_of(process)
                self._cluster.notify()

        self.process.on_exit = on_exit

    def kill(self) -> None:
        """Ends the actor, and its process with it."""
        if not self.alive:
            return
        self.alive = False
        if self._call is not None and not self._call.done:
            self._call.error = _dead()
        if self.process is not None:
            self.process.kill()
        self._cluster.notify()


def _dead() -> Exception:
    return ray.exceptions.RayActorError(error_msg="The actor is dead because it was killed.")


def _exit_of(process: Process) -> RoleExit:
    error = process.error
    if error is None:
        return RoleExit(1, reason=str(process.result))
    if isinstance(error, Killed):
        return RoleExit(1, died=ExitDiagnostics(None, ()))
    return RoleExit(1, failure=Failure.of(error), fenced=isinstance(error, Fenced))


class RayModel:
    """The module `ray` as the fleet has it, and its class of actors."""

    exceptions = ray.exceptions

    def __init__(self, scheduler: Scheduler, start: Callable[[str], Process]) -> None:
        self.scheduler, self.start = scheduler, start
        self.actors: list[Actor] = []
        self._waiters: list[Task] = []

    def notify(self) -> None:
        for task in self._waiters:
            self.scheduler.wake(task)

    def options(self, **_: Any) -> RayModel:
        return self

    def remote(self, name: str, *_: Any) -> Actor:
        self.actors = [actor for actor in self.actors if actor.alive]
        self.actors.append(actor := Actor(self, name))
        return actor

    def wait(self, calls: Sequence[Call], num_returns: int, timeout: float) -> tuple[list[Call], list[Call]]:
        def enough() -> bool:
            return sum(call.done for call in calls) >= num_returns

        self.scheduler.wait_until(self._waiters, enough, timeout)
        done = [call for call in calls if call.done][:num_returns]
        return done, [call for call in calls if call not in done]

    def get(self, call: Call) -> RoleExit:
        if call.error is not None:
            raise call.error
        assert call.result is not None
        return call.result

    def kill(self, actor: Actor, no_restart: bool) -> None:
        actor.kill()

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": _CORES}

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": _NODE, "Resources": self.cluster_resources(), "Alive": True}]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: _NODE)


def _kill_here(actor: Actor) -> None:
    if actor.process is not None:
        actor.process.kill()


@contextmanager
def simulated_ray(model: RayModel) -> Iterator[None]:
    """Gives the fleet this Ray while it lasts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet, "RoleActor", model)
        patch.setattr(fleet, "kill_here", _kill_here)
        for module in (fleet, managed_actor, worker_pool, capacity):
            patch.setattr(module, "ray", model)
        yield
