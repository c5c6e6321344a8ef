"""What is done to experience between the log and the algorithm: scale and clip rewards, then a function of the user's.

All of it depends on one fragment alone, so that a replay memory can be filled again from the log. What has a state (the
normalisers) belongs to the policy version or to the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shared.config import PolicyConfig
from shared.errors import ConfigError
from shared.fragment import holdable
from shared.spaces import Columns
from shared.user_code import import_object

Transform = Callable[[Columns], Columns]


class ExperienceFilter:
    """The filters of one policy, in the order of their fields in the config."""

    def __init__(self, config: PolicyConfig, field: str) -> None:
        self._scale, self._clip = config.reward_scale, config.reward_clip
        self._where = f"{field}.transform={config.transform}"
        self._transform = (
            None if config.transform is None else import_object(config.transform, f"{field}.transform", kind="function")
        )

    def __call__(self, columns: Columns) -> Columns:
        """The columns of a fragment (shared/fragment.py) as they are to be learnt from; they are not changed.

        Raises `ConfigError` where the user's function raises, or answers what a fragment cannot hold.
        """
        reward = columns["reward"]
        if self._scale != 1.0:
            reward = reward * np.float32(self._scale)
        if self._clip is not None:
            reward = np.clip(reward, *np.asarray(self._clip, np.float32))
        columns = columns | {"reward": reward}
        return columns if self._transform is None else self._transformed(self._transform, columns)

    def _transformed(self, transform: Transform, columns: Columns) -> Columns:
        try:
            found = transform({name: array.copy() for name, array in columns.items()})
            wrong = [
                name
                for name, array in columns.items()
                if (found[name].shape, found[name].dtype) != (array.shape, array.dtype)
                or not holdable(name, found[name])
            ]
        except Exception as error:
            raise ConfigError(f"{self._where} failed: {type(error).__name__}: {error}") from error
        if wrong or set(found) != set(columns):
            odd = ", ".join(wrong or sorted(set(found) ^ set(columns)))
            raise ConfigError(
                f"{self._where} must answer the same columns with the same shapes and dtypes, all finite; not so: {odd}"
            )
        return found
