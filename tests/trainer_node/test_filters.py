"""Filters between log and algorithm: what they do, that a memory is filled again through them, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.experience.spaces import Columns
from stagecoach.trainer_node.learning.learner import ExperienceFilter

MODULE = "tests.trainer_node.test_filters"


def shaped(columns: Columns) -> Columns:
    """Rewards by what is observed; what it is given belongs to it."""
    columns["reward"] += columns["obs"][..., 0]
    return columns


def other_shape(columns: Columns) -> Columns:
    return columns | {"reward": columns["reward"][:1]}


def other_dtype(columns: Columns) -> Columns:
    return columns | {"reward": columns["reward"].astype(np.float64)}


def not_a_number(columns: Columns) -> Columns:
    return columns | {"reward": columns["reward"] * np.float32(np.nan)}


def one_more(columns: Columns) -> Columns:
    return columns | {"extra": columns["reward"]}


def raises(columns: Columns) -> Columns:
    raise RuntimeError("no such column")


def columns() -> Columns:
    reward = np.array([[-3.0, 0.25], [1.0, 40.0]], np.float32)
    return {"reward": reward, "obs": np.arange(8, dtype=np.float32).reshape(2, 2, 2)}


def filtered(**config: Any) -> Columns:
    given = columns()
    found = ExperienceFilter(PolicyConfig.model_validate(config), "policies.p")(given)
    assert (given["reward"] == columns()["reward"]).all() and found["reward"].dtype == np.float32
    return found


def test_rewards_are_scaled_then_clipped_then_transformed() -> None:
    assert filtered()["reward"].tolist() == columns()["reward"].tolist()
    assert filtered(reward_scale=2.0)["reward"].tolist() == [[-6.0, 0.5], [2.0, 80.0]]
    assert filtered(reward_scale=2.0, reward_clip=(-1, 3))["reward"].tolist() == [[-1.0, 0.5], [2.0, 3.0]]
    all_of_it = filtered(reward_scale=2.0, reward_clip=(-1, 3), transform=f"{MODULE}:shaped")
    assert all_of_it["reward"].tolist() == [[-1.0, 2.5], [6.0, 9.0]]


@pytest.mark.parametrize(
    ("transform", "said"),
    [
        ("other_shape", "the same shapes and dtypes.*reward"),
        ("other_dtype", "the same shapes and dtypes.*reward"),
        ("not_a_number", "all finite; not so: reward"),
        ("one_more", "not so: extra"),
        ("raises", "failed: RuntimeError: no such column"),
    ],
)
def test_transform_is_refused_when_it_breaks_columns(transform: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"policies.p.transform={MODULE}:{transform}.*{said}"):
        filtered(transform=f"{MODULE}:{transform}")


@pytest.mark.parametrize("path", [f"{MODULE}:nothing", "nowhere.at_all:function"])
def test_missing_transform_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=f"policies.p.transform={path} cannot be imported"):
        filtered(transform=path)
