"""All the boxes in one process and one thread: for a debugger, and for tests. The same Redis, store and protocol."""

from __future__ import annotations

import threading
from pathlib import Path

from coordinator.redis_outage import tell_of_outages
from rollout_worker.evaluator import Evaluator
from rollout_worker.worker import Worker
from shared.config import Config
from shared.connection import abandon
from shared.errors import ConfigError
from shared.failure import RunEnd
from shared.role import Role, open_role
from trainer_node.trainer import Trainer


def refuse_ranks(config: Config) -> None:
    """Raises `ConfigError` where one process is not enough."""
    if config.trainer.ranks > 1:
        raise ConfigError(
            f"--inline puts all roles into one process, but trainer.ranks={config.trainer.ranks} needs as many; leave "
            f"--inline out, or set trainer.ranks=1"
        )


class InlineRoles:
    """Trainer, workers and evaluator take turns."""

    def __init__(self, role: Role, run_folder: str) -> None:
        self._role = role  # the coordinator's; the others connect with the credentials that theirs have
        self._playing = open_role(role.config, role.address, "worker")
        learning, scoring = (open_role(role.config, role.address, name) for name in ("trainer", "evaluator"))
        self._trainer = Trainer(learning, run_folder)
        self._evaluator = Evaluator(scoring)
        self._workers: dict[int, Worker] = {}
        self._turn = 0
        self._clients = [made.redis for made in (self._playing, learning, scoring)]
        tell_of_outages(role, Path(run_folder), *self._clients)

    def run(self, abandon: threading.Event) -> RunEnd:
        """Until the run ends; returns why."""
        end = RunEnd("abandoned")
        try:
            self._trainer.start()
            self._evaluator.start()
            while not abandon.is_set():
                self._scale(self._role.flow.read().desired_workers)
                self._act()
                if self._trainer.step(0.0) == "ended":
                    end = self._finish()
                    break
                self._evaluator.step(0.0)
        except Exception as error:
            if abandon.is_set():  # perhaps by the Redis that it waited for
                return end
            self._trainer.fail(error)
            raise
        finally:
            for worker in self._workers.values():
                worker.stop(end.reason)
            self._evaluator.stop(end.reason)
        return end

    def leave_services(self) -> None:
        """Ends the patience with a Redis or a store that is away."""
        abandon(self._role.redis, *self._clients)

    def _finish(self) -> RunEnd:
        flow = self._role.flow.read()
        end = RunEnd(flow.reason or "exhausted", flow.failure)
        self._trainer.save_last(end.reason)
        self._evaluator.step(0.0)
        self._trainer.finish(end.reason)
        return end

    def _scale(self, desired: int) -> None:
        for index in range(desired):
            if index not in self._workers:
                self._role.flow.undrain(f"worker-{index}")
                self._workers[index] = Worker(self._playing, index)
                self._workers[index].start()
        for index in [index for index in self._workers if index >= desired]:
            self._role.flow.drain(self._workers[index].id)

    def _act(self) -> None:
        self._turn += 1  # who begins changes, so that none starves where credit is short
        order = sorted(self._workers, key=lambda index: (index - self._turn) % (max(self._workers) + 1))
        for index in order:
            worker = self._workers[index]
            word = worker.step(0.0)
            if word.startswith("end:"):
                worker.stop(word.removeprefix("end:"))
                del self._workers[index]
