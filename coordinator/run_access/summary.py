"""A run at a glance, for notebooks and programs: best checkpoint, one line, a small table, a link."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stagecoach.coordinator.catalog.status import Status
from stagecoach.shared.base.failure import reason_in_words
from stagecoach.shared.base.printable import figure
from stagecoach.shared.experience.checkpoint_name import checkpoint_env_steps
from stagecoach.shared.protocol.events import confirmed_return


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint that scored best in its second evaluation, from other starts than the first one."""

    name: str
    score: float
    """Mean return, or what `checkpoint.best_by` names."""
    env_steps: int
    """Env steps trained on."""
    location: str
    """Folder or URL, for `stagecoach.load_policy`."""


def best_checkpoint(entries: Sequence[dict[str, Any]], store_location: str) -> BestCheckpoint | None:
    """Returns the entry with the mark `best`; None without such an entry or its score."""
    for entry in entries:
        score = confirmed_return(entry.get("evaluation") or {}) if "best" in entry["marks"] else None
        if score is not None:
            name = entry["name"]
            return BestCheckpoint(name, score, checkpoint_env_steps(name), f"{store_location}/checkpoints/{name}")
    return None


def rows(status: Status, best: BestCheckpoint | None, checkpoints: int) -> dict[str, str]:
    """Title → text of what a learner looks for first."""
    reason = f": {reason_in_words(status.reason.partition(chr(10))[0])}" if status.reason else ""
    shown = "–" if best is None else f"{figure(best.score)} ({best.name})"
    return {
        "state": f"{status.state}{reason}", "env steps": f"{status.env_steps:,}",
        "return": figure(status.metrics.get("rollout/ep_rew_mean")), "best": shown, "checkpoints": str(checkpoints),
    }  # fmt: skip


def as_html(run_id: str, shown: dict[str, str]) -> str:
    lines = "".join(f"<tr><th>{title}</th><td>{html.escape(text)}</td></tr>" for title, text in shown.items())
    return f"<table><caption>{html.escape(run_id)}</caption>{lines}</table>"


class PageAddress(str):
    """A URL that a notebook shows as a link."""

    def _repr_html_(self) -> str:
        return f'<a href="{html.escape(self)}" target="_blank">{html.escape(self)}</a>'
