"""The Ray actor of every role: a thin process that starts the role's own, passes signals on, and says how it ended.

It imports neither PyTorch nor the role, and starts at once: those are in the process that it starts, on whatever
machine Ray has placed it (shared/runtime/role_process.py).
"""

import signal
from typing import Any

import ray

from stagecoach.shared.base.process import handling, shield_from_terminal
from stagecoach.shared.runtime.role_process import Request, RoleExit, RoleProcess

_TARGETS = {
    "trainer": "stagecoach.trainer_node.process:run", "rank": "stagecoach.trainer_node.process:run",
    "worker": "stagecoach.rollout_worker.process:run", "evaluator": "stagecoach.rollout_worker.process:run",
}  # fmt: skip


class Role:
    """One role, in one process after another."""

    def __init__(self, name: str, launch: bytes, zygote: str) -> None:
        """Takes an encoded `RoleLaunch`, and the name of the zygote on each machine."""
        self._name, self._launch, self._zygote = name, launch, zygote

    def __repr__(self) -> str:
        """Names the role in Ray's dashboard and logs."""
        return self._name

    @ray.method
    def run(self) -> RoleExit:
        """Blocks until the role's process has ended."""
        shield_from_terminal()
        target = _TARGETS[self._name.partition("-")[0]]
        process = RoleProcess(Request.of(target, self._name, self._launch, "redis", "store"), self._zygote)
        with handling(lambda number, _: process.signal(signal.Signals(number)), signal.SIGTERM):
            return process.wait()


RoleActor: Any = ray.remote(Role)
