"""What Ray asks of us as it begins: a hook of `ray start` (RAY_START_HOOK), and a variable that a driver reads.

Imports nothing large: Ray waits for it, and so does every command.
"""

from __future__ import annotations

import os
from typing import Any


def without_client_server(parameters: Any, head: bool) -> None:
    """No server for Ray Client (`ray://`), which nobody uses here: a second of processor time, and 70 MB."""
    parameters.ray_client_server_port = None


def outlive_ray() -> None:
    """To be called before Ray is imported, which reads this then and never again.

    Where a connection to its raylet breaks, a driver ends its process at once if the process of this id has ended, or,
    without one, if its parent is process 1: as in a container, under systemd, and of what was started in the
    background. Ours names itself; that Ray has died is noticed by `RayHead.lost`.
    """
    os.environ["RAY_RAYLET_PID"] = str(os.getpid())
