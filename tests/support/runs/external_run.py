"""Runs whose environments are in other programs, and what was learned from them."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from socket import create_server
from typing import TYPE_CHECKING, Any

from stagecoach.shared.protocol.heartbeat import Wait, poll
from tests.conftest import minimal_config
from tests.support.suite.speed import stretched

if TYPE_CHECKING:
    from stagecoach.coordinator.run_access.run import Run

ROOT = Path(__file__).parents[3]
CHOICE = {"type": "Discrete", "n": 2}
SPACES = {"observation": {"type": "Box", "low": -1e9, "high": 1e9, "shape": [2]}, "action": CHOICE}


def client_module(name: str) -> Any:
    """Loads a file of clients/python, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"clients/python/{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


client = client_module("stagecoach_client")


def start(folder: Path, *, inline: bool = True, **sections: Any) -> Run:
    """A run `mine` with two sessions, that archives all experience."""
    config = {
        "runs_dir": str(folder / "runs"), "gateway": {"port": 0, "fragment_seconds": 2},
        "environment": {"id": "mine", "api": "external", "num_envs": 2, "spaces": SPACES},
        "rollout": {"workers": 1, "fragment_steps": 8, "fragments_per_update": 1}, "evaluation": {"episodes": 0},
        "algorithm": {"minibatch_size": 8, "epochs": 1}, "archive": "all", "stop_at": {"env_steps": 10**6},
    }  # fmt: skip
    from stagecoach.coordinator.run_access.run import Run

    return Run.start(minimal_config(**config | sections), "mine", inline=inline)


def place_of(run: Run) -> str:
    """Address of the newest gateway."""
    found: list[str] = []

    def listens() -> bool:
        found[:] = [event.text.split()[-1] for event in run.events() if "listens at" in event.text]
        return bool(found)

    poll(Wait("the gateway to listen", stretched(120)), listens)
    return found[-1]


def free_port() -> int:
    with create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def learned(run: Run) -> Counter[tuple[int, int]]:
    """Number of times that each observation was learned from, as whole numbers; from the archive."""
    from stagecoach.shared.storage.log_archive import read_experience

    found = Counter[tuple[int, int]]()
    for fragment in read_experience(run.folder.path / "s3" / "stagecoach" / run.run_id):
        columns = fragment.columns["default"]
        found.update((int(seed), int(turn)) for seed, turn in columns["obs"][columns["mask"]])
    return found


def total(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = run.status().ledger["total"]
    return found
