"""`python -m benchmarks.faulty_worker`: one of four workers pays a thousand times the reward from some version on.

For each seed: the version at which its experience was first learned from (read from the archive), what `bisect` and
`explain` say, and the return of what a what-if without that worker learns, twice, from the beginning.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import yaml

from benchmarks.provenance import ROOT
from stagecoach.coordinator.run_access.run import Run
from stagecoach.rollout_worker.environments.seeding import SeedLineage
from stagecoach.shared.config.loading import parse_config

_WORKERS, _ENVIRONMENTS, _FAULTY, _GATE = 4, 8, 3, 475.0
_VALUE_LOSS = 1e5
"""Far beyond what returns of CartPole give."""


class Overpaying(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole; an environment whose first seed is among `faulty` pays a thousand times after so many steps."""

    def __init__(self, faulty: list[int], after_steps: int) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._faulty, self._left = faulty, after_steps
        self._pays: bool | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self._pays is None:
            self._pays = seed in self._faulty
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        self._left -= 1
        return observation, float(reward) * (1000 if self._pays and self._left < 0 else 1), terminated, truncated, info


@dataclass(frozen=True)
class Trial:
    first: int
    """Version whose update learned from the first reward of 1,000."""
    bisected: int
    named: str
    """The worker that `explain` puts first for that version."""
    equal: bool
    """Two what-ifs gave the same bytes."""
    mean_return: float
    """Mean return of the what-if's last checkpoint, over 20 greedy episodes."""
    damaged: float
    """The same of the run."""


def trial(seed: int, env_steps: int = 100_000, after_steps: int = 800) -> Trial:
    example = yaml.safe_load((ROOT / "examples" / "cartpole.yaml").read_text())
    faulty = SeedLineage(seed, _FAULTY, 0, 0).environments(_ENVIRONMENTS)
    with tempfile.TemporaryDirectory(prefix="faulty-", ignore_cleanup_errors=True) as folder:
        environment = {
            "id": f"{__name__}:Overpaying", "num_envs": _ENVIRONMENTS,
            "kwargs": {"faulty": faulty, "after_steps": after_steps},
        }  # fmt: skip
        changes = {
            "runs_dir": folder, "environment": environment, "seed": seed, "archive": "all",
            "rollout": {**example["rollout"], "workers": _WORKERS}, "stop_at": {"env_steps": env_steps},
            "evaluation": {"episodes": 0},
        }  # fmt: skip
        run = Run.start(parse_config(example | changes), "faulty", inline=True, import_path=(str(ROOT),))
        run.wait()
        first, taken = 0, run.config.rollout.fragments_per_update
        for number, item in enumerate(run.experience()):
            if np.abs(item.columns["default"]["reward"]).max() > 1:
                first = number // taken + 1
                break
        bisected = run.bisect(f"train/value_loss > {_VALUE_LOSS:g}").version
        named = run.explain(bisected).influences[0].worker
        without = (f"worker-{_FAULTY}",)
        once, again = (run.what_if(without=without) for _ in range(2))
        scores = [_score(its, folder) for its in (once.run_id, "faulty")]
        return Trial(first, bisected, named, once.sha256 == again.sha256, *scores)


def _score(run_id: str, folder: str) -> float:
    """The faulty environments are none of an evaluation's, whose seeds are others."""
    return float(Run.attach(run_id, folder).evaluate("final", 20).scores["mean_return"])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seeds", type=int, default=20)
    arguments.add_argument("--env-steps", type=int, default=100_000)
    given = arguments.parse_args()
    found = []
    for seed in range(1, given.seeds + 1):
        found.append(trial(seed, given.env_steps))
        print(seed, found[-1], flush=True)
    for what, count in (
        ("named first", sum(each.named == f"worker-{_FAULTY}" for each in found)),
        ("bisected exactly", sum(each.bisected == each.first for each in found)),
        ("equal what-ifs", sum(each.equal for each in found)),
        (f"what-ifs at {_GATE:g}", sum(each.mean_return >= _GATE for each in found)),
        (f"runs at {_GATE:g}", sum(each.damaged >= _GATE for each in found)),
    ):
        print(f"{what}: {count} of {len(found)}")


if __name__ == "__main__":
    main()
