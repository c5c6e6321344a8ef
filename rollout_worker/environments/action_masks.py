"""Action masks: from a leaf of the observation or from each step's `info` (`environment.action_mask`)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from stagecoach.shared.base.errors import ConfigError, EnvironmentUnusable
from stagecoach.shared.experience.spaces import Leaf, SpaceSpec

KEY = "action_mask"
Source = Literal["auto", "observation", "info", "off"]


def from_info(observation: Any, info: Mapping[str, Any], choices: int) -> dict[str, Any]:
    """Returns the observation as a dict with the mask from `info`; anything but a dict becomes its entry `observation`.
    Raises `EnvironmentUnusable` without a mask of that size."""
    found = info.get(KEY)
    parts = found if isinstance(found, tuple | list) else [found]
    mask = None if found is None else np.concatenate([np.asarray(part).reshape(-1) for part in parts])
    if mask is None or mask.shape != (choices,):
        what = "none" if mask is None else f"{mask.size} numbers"
        raise EnvironmentUnusable(
            f"environment.action_mask=info expects info[{KEY!r}] with {choices} numbers, found {what}; return it "
            f"from each reset and step, or use environment.action_mask=auto"
        )
    inside = observation if isinstance(observation, dict) else {"observation": observation}
    return {**inside, KEY: (mask > 0).astype(np.int8)}


def space_with_mask(observation: spaces.Space[Any], choices: int) -> spaces.Dict:
    """Returns the space with a mask of so many choices; raises `ConfigError` for none."""
    if not choices:
        raise ConfigError(
            "environment.action_mask=info masks choices, and the action space has none; use environment.action_mask=off"
        )
    inside = observation.spaces if isinstance(observation, spaces.Dict) else {"observation": observation}
    return spaces.Dict({**inside, KEY: spaces.Box(0, 1, (choices,), np.int8)})


def choices(action: spaces.Space[Any]) -> list[int]:
    """Returns the number of options of each choice in the space, in a mask's order; 0 for a box."""
    if isinstance(action, spaces.Discrete):
        return [int(action.n)]
    if isinstance(action, spaces.MultiDiscrete):
        return [int(n) for n in action.nvec.flatten()]
    if isinstance(action, spaces.MultiBinary):
        return [2] * int(np.prod(action.shape))
    if isinstance(action, spaces.Dict | spaces.Tuple):
        inner = action.spaces.values() if isinstance(action, spaces.Dict) else action.spaces
        return [size for space in inner for size in choices(space)]
    return [0]


class MaskFromInfo(gym.Wrapper[Any, Any, Any, Any]):
    """Puts `info["action_mask"]` into the observation."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._choices = sum(choices(env.action_space))
        self.observation_space = space_with_mask(env.observation_space, self._choices)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return from_info(observation, info, self._choices), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        if (terminated or truncated) and KEY not in info:  # no further action
            info = {**info, KEY: np.zeros(self._choices, np.int8)}
        return from_info(observation, info, self._choices), reward, terminated, truncated, info


def marked(observation: SpaceSpec, action: SpaceSpec, source: Source, whose: str, boxes: bool = False) -> SpaceSpec:
    """Returns the observation with its `action_mask` leaves marked as masks, in the order of the action's leaves: a
    number for each choice (and box, if `boxes`). Raises `ConfigError` if a mask is missing or does not fit."""
    here = [index for index, leaf in enumerate(observation.leaves) if leaf.path.partition(".")[0] == KEY]
    choices = sum(sum(leaf.nvec) or boxes for leaf in action.leaves)
    if source == "off" or (source == "auto" and not (here and choices)):
        return observation
    masks = [observation.leaves[index] for index in here]
    size = sum(leaf.size for leaf in masks if leaf.kind in ("box", "multi_binary"))
    if not here or size != choices or not choices or len(here) == len(observation.leaves):
        found = f"{size} numbers" if here else "none"
        raise ConfigError(
            f"environment.action_mask={source} expects {whose} to observe an {KEY} of {choices} numbers, one for each "
            f"choice, and something else; it has {found}; use environment.action_mask=info if `info` has the mask, or "
            f"off, or correct the space"
        )
    order = _in_order(masks, action, whose)
    leaves, now = list(observation.leaves), dict(zip((here[index] for index in order), here, strict=True))
    for before, after in now.items():
        leaves[after] = replace(observation.leaves[before], mask=True)
    return SpaceSpec(tuple(leaves), _renumbered(observation.structure, now))


def _in_order(masks: Sequence[Leaf], action: SpaceSpec, whose: str) -> list[int]:
    """Returns the masks' positions in the order of the action's leaves; a dict may be sorted in one space only."""
    acted = {leaf.path: sum(leaf.nvec) for leaf in action.leaves if leaf.nvec}
    if len(masks) == 1 or len(acted) == 1:
        return list(range(len(masks)))
    named = {leaf.path.removeprefix(KEY).removeprefix("."): leaf.size for leaf in masks}
    if named != acted:
        raise ConfigError(
            f"the {KEY} that {whose} observes has parts of {named} numbers, and the action space has choices of "
            f"{acted}; expected the same names and sizes, or one array for all"
        )
    return [list(named).index(path) for path in acted]


def _renumbered(structure: Any, now: Mapping[int, int]) -> Any:
    if isinstance(structure, int):
        return now.get(structure, structure)
    if "dict" in structure:
        return {"dict": {key: _renumbered(below, now) for key, below in structure["dict"].items()}}
    return {"tuple": [_renumbered(below, now) for below in structure["tuple"]]}
