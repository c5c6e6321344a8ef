"""Going back to an older checkpoint with a replay memory: exactly as it was, or refused before anything is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.run import Run
from shared.checkpoint import checkpoint_name
from shared.errors import UserError
from tests.conftest import minimal_config

pytestmark = pytest.mark.timeout(180)
OLD = checkpoint_name(5, 80)


def trained(folder: Path, archive: str) -> Run:
    """A run whose memory of four fragments has long forgotten what it held at version 5."""
    sections: dict[str, Any] = {
        "runs_dir": str(folder / "runs"), "environment": {"id": "CartPole-v1", "num_envs": 2},
        "algorithm": {"name": "dqn", "memory": {"kind": "uniform", "capacity": 64}, "minibatch_size": 8},
        "rollout": {"workers": 1, "fragment_steps": 8, "fragments_per_update": 1}, "evaluation": {"episodes": 1},
        "checkpoint": {"every": "5 updates", "keep_last": 1, "keep_every": 5}, "stop_at": {"updates": 40},
        "archive": {"keep": archive, "segment_bytes": 1024},
    }  # fmt: skip
    run = Run.start(minimal_config(**sections | {"stop_at": {"updates": 5}}), "a", inline=True)
    assert run.wait(120).reason == "exhausted"  # so that it has this checkpoint, however slow the disk is
    run = Run.resume("a", run.config.runs_dir, ("stop_at.updates=40",), inline=True)
    assert run.wait(120).reason == "exhausted"
    assert OLD in {entry["name"] for entry in run.checkpoints()}
    return run


@pytest.mark.exhaustive
def test_without_what_its_memory_held_it_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    run = trained(tmp_path, "off")
    before = {path: path.read_bytes() for path in Path(run.store_location).rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=rf"resume --from {OLD}: .*nothing was changed, choose another checkpoint"):
        Run.resume("a", run.config.runs_dir, ("stop_at.updates=50",), inline=True, origin=OLD)
    assert {path: path.read_bytes() for path in Path(run.store_location).rglob("*") if path.is_file()} == before


def test_with_the_whole_archive_it_goes_on(tmp_path: Path) -> None:
    run = trained(tmp_path, "all")
    again = Run.resume("a", run.config.runs_dir, ("stop_at.updates=12",), inline=True, origin=OLD)
    outcome = again.wait(120)
    assert outcome.reason == "exhausted" and outcome.status.ledger["total"]["balances"]
