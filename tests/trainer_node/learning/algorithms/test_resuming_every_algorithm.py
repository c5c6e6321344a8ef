"""Every algorithm goes on exactly where its run died, and is replayed, with all that it may have at once.

Replay buffers with priorities, noise on actions and weights, target networks, reward signals, cloning, cores,
normalized rewards, schedules. Where a buffer comes back from is test_remembering.py; workers that die,
test_exact_resume.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stagecoach.shared.config.algorithms.registry import ALGORITHMS
from stagecoach.shared.experience import fragment
from stagecoach.shared.experience.fragment import LARGEST, Fragment
from tests.support.learning.cases import CASES, config_of
from tests.support.runs.game import NewGame, balanced, goes_on_exactly


def test_none_is_left_out() -> None:
    assert {name for name, _, _ in CASES.values()} == set(ALGORITHMS)


@pytest.mark.parametrize("case", CASES)
def test_every_algorithm_resumes_exactly(new_game: NewGame, tmp_path: Path, case: str) -> None:
    goes_on_exactly(new_game, config_of(case, tmp_path, archive="all"))


@pytest.mark.parametrize("case", [*{name: case for case, (name, _, _) in reversed(CASES.items())}.values()])
def test_huge_numbers_leave_the_weights_finite(
    new_game: NewGame, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, rng = fragment.encode, np.random.default_rng(3)

    def extreme(made: Fragment, *options: object) -> bytes:
        for columns in made.columns.values():
            for name, array in columns.items():
                if array.dtype == np.float32 and name != "log_prob":
                    some = rng.random(array.shape) < (0.0 if name.startswith("action") else 0.3)
                    columns[name] = np.where(some, np.float32(LARGEST) * rng.choice([-1, 1], array.shape), array)
                    columns[name] = columns[name].astype(np.float32)
            columns["log_prob"][::2] = -LARGEST
        return encode(made, *options)  # type: ignore[arg-type]

    monkeypatch.setattr(fragment, "encode", extreme)
    policy = {"hidden_sizes": [8]} | CASES[case][2].get("policies", {}).get("default", {})
    policy |= {"normalize_observations": False, "normalize_rewards": False}
    game = new_game(config_of(case, tmp_path, policies={"default": policy}))
    game.finish()
    assert list(balanced(game)["total"]["dropped"]) in ([], ["stale"])
