"""What `ray start` asks of us (RAY_START_HOOK) when an embedded Ray begins. Imports nothing: Ray waits for it."""

from __future__ import annotations

from typing import Any


def without_client_server(parameters: Any, head: bool) -> None:
    """No server for Ray Client (`ray://`), which nobody uses here: a second of processor time, and 70 MB."""
    parameters.ray_client_server_port = None
