"""Hindsight experience replay (Andrychowicz et al. 2017) for goal environments.

Of each batch a fraction is drawn as if another goal had been desired: one that was achieved after a step of the same
episode. An episode that ended because its own goal was reached continues under another one; one that terminated for
another reason ends there under any. Where it is not known what a terminated step led to, such a step keeps its goal,
gives none, and a relabeled n-step return ends before it. Of an episode that is not over, or whose first steps have left
the replay buffer, the part that is known counts as the episode. Hindsight actions and penalties for the upper levels of
a hierarchy (Levy et al. 2019) are explained in docs/guides/hierarchy.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.base.user_code import import_object
from stagecoach.shared.config.algorithms.replay_buffer import HindsightReplay
from stagecoach.shared.experience import goals
from stagecoach.shared.experience.fragment import INFO
from stagecoach.shared.experience.spaces import Array, Columns, PolicySpaces
from stagecoach.trainer_node.learning.replay_buffers.observation_column import NOTHING
from stagecoach.trainer_node.learning.replay_buffers.storage import FragmentRing
from stagecoach.trainer_node.learning.replay_buffers.uniform import ReplayBuffer

ACHIEVED, DESIRED, BELOW = (f"obs.{leaf}" for leaf in (goals.ACHIEVED, goals.DESIRED, goals.BELOW))
Strategy = Literal["future", "final", "episode"]


class HindsightReplayBuffer(ReplayBuffer):
    """Draws uniformly, and relabels. Sequences keep their goals."""

    def __init__(
        self, spaces: PolicySpaces, steps: int, slots: int, capacity: int, *, strategy: Strategy,
        relabeled_fraction: float, reward: GoalReward, actions: bool = False, missed_penalty: float | None = None,
        bounded: bool = False,
    ) -> None:  # fmt: skip
        """`bounded`: `reward` gives −1 or 0; `value_bounds` then holds while all rewards seen are of these."""
        self.info_columns = () if missed_penalty is None else (goals.MISSED,)
        super().__init__(spaces, steps, slots, capacity)
        shapes = {leaf.column("obs"): leaf.shape for leaf in spaces.observation.leaves}
        if ACHIEVED not in shapes or shapes[ACHIEVED] != shapes.get(DESIRED):
            raise ConfigError(
                f"a hindsight replay buffer needs observations with achieved_goal and desired_goal of equal shape, "
                f"found {shapes}; use a goal environment or another algorithm.replay_buffer.kind"
            )
        self._strategy, self._fraction, self._reward = strategy, relabeled_fraction, reward
        self._penalty, self._bounds = missed_penalty, None
        if actions:
            (action,) = spaces.action.leaves
            if shapes.get(BELOW) != action.shape:
                raise ConfigError(
                    f"hindsight_actions=true needs actions that are goals of a level below, found observations "
                    f"{shapes} and actions of the shape {action.shape}; use it for the upper levels of a hierarchy"
                )
            self._bounds = action.bounds()
        self._spans, self._bounded = EpisodeSpans(self.ring), bounded

    def _placed(self, place: int) -> None:
        self._spans.put(place)
        self._bounded = self._bounded and bool(np.isin(self.ring.held("reward", place), (-1, 0)).all())

    def value_bounds(self, gamma: float) -> tuple[float, float] | None:
        if not self._bounded:
            return None
        return -max(math.inf if gamma == 1 else 1 / (1 - gamma), self._penalty or 0.0), 0.0

    def state(self) -> Columns:
        return super().state() | {"bounded": np.array(self._bounded)}

    def load_state(self, arrays: Columns) -> None:
        super().load_state(arrays)
        self._bounded = bool(arrays["bounded"])

    def _relabeled(
        self, generator: np.random.Generator, path: Array, valid: Array, reward: Array, over: Array
    ) -> dict[str, tuple[Array, Array]]:
        which, sources = self._sources(path[0], generator)
        sought = self.ring.next_observations(sources, ACHIEVED)[ACHIEVED]
        if len(which):
            valid[:, which], reward[:, which], over[:, which] = self._again(
                path[:, which], valid[:, which] & ~self.ring.next_unknown(path[:, which]), sought
            )
        changed = {DESIRED: (which, sought)}
        missed = np.zeros(len(path[0]), np.bool_)
        if self._penalty is not None:
            missed = self.ring.column(INFO + self.info_columns[0], path[0]) > 0
            missed[which] = False
            valid[1:, missed], reward[0, missed], over[0, missed] = False, -self._penalty, True
        if self._bounds is not None:
            others = np.flatnonzero(~missed & ~self.ring.next_unknown(path[0]))
            achieved = self.ring.next_observations(path[0, others], BELOW)[BELOW]
            changed["action"] = others, np.clip(achieved, *self._bounds)
        return changed

    def _sources(self, rows: Array, generator: np.random.Generator) -> tuple[Array, Array]:
        """Returns the rows to relabel, and the step at which each new goal was achieved."""
        chosen, share = generator.random((2, len(rows)))
        which = np.flatnonzero((chosen < self._fraction) & ~self.ring.next_unknown(rows))
        rows, share = rows[which], share[which]
        end, ahead = self._spans.ends(rows)
        ahead = ahead - self.ring.next_unknown(end)
        if self._strategy == "final":
            return which, self._spans.later(rows, ahead)
        if self._strategy == "future":
            return which, self._spans.later(rows, (share * (ahead + 1)).astype(np.int64))
        begin, behind = self._spans.begins(rows)
        return which, self._spans.later(begin, (share * (behind + ahead + 1)).astype(np.int64))

    def _again(self, path: Array, valid: Array, goals: Array) -> tuple[Array, Array, Array]:
        rows = path.reshape(-1)
        achieved = self.ring.next_observations(rows, ACHIEVED)[ACHIEVED]
        desired = np.broadcast_to(goals, (*path.shape, *goals.shape[1:])).reshape(achieved.shape)
        reward, over = self._judged(achieved, desired)
        if len(ended := np.flatnonzero(self.ring.column("terminated", rows))):
            over[ended] |= ~self._judged(achieved[ended], self.ring.observations(rows[ended])[DESIRED])[1]
        over = over.reshape(path.shape)
        valid = valid.copy()
        for step in range(1, len(path)):
            valid[step] &= valid[step - 1] & ~over[step - 1]
        return valid, reward.reshape(path.shape), over

    def _judged(self, achieved: Array, desired: Array) -> tuple[Array, Array]:
        """Reward (float32) and whether the goal ends the episode (bool), both `[B]`, of goals `[B, …]`."""
        reward, over = (np.asarray(part) for part in self._reward(achieved, desired))
        if reward.shape != (len(achieved),) or over.shape != (len(achieved),):
            raise ValueError(f"the goal reward returned {len(achieved)} goals with {reward.shape} and {over.shape}")
        return reward.astype(np.float32), over.astype(np.bool_)


class EpisodeSpans:
    """First and last row of each step's episode in the buffer; eight bytes a row."""

    def __init__(self, ring: FragmentRing) -> None:
        self._ring = ring
        shape = (ring.fragments, ring.steps, ring.slots)
        self._first, self._last = np.zeros(shape, np.int32), np.zeros(shape, np.int32)

    def put(self, place: int) -> None:
        ring = self._ring
        rows = np.arange(place * ring.rows_each, (place + 1) * ring.rows_each).reshape(ring.steps, ring.slots)
        step = np.arange(ring.steps)[:, None]
        goes_on = ring.next_rows(rows) != NOTHING
        goes_on[-1] = False
        began = np.vstack([np.ones_like(goes_on[:1]), ~goes_on[:-1]])
        self._first[place] = np.maximum.accumulate(np.where(began, step, 0))
        self._last[place] = np.minimum.accumulate(np.where(goes_on, ring.steps, step)[::-1])[::-1]

    def ends(self, rows: Array) -> tuple[Array, Array]:
        """The last known step of each one's episode, and how many steps later that is."""
        ring, last = self._ring, self._last.reshape(-1)
        ahead = last[rows] - self._step(rows)
        end = rows + ahead * ring.slots
        while True:
            after = ring.next_rows(end)
            more = after != NOTHING
            if not more.any():
                return end, ahead
            ahead = ahead + np.where(more, last[after] + 1, 0)
            end = np.where(more, after + last[after] * ring.slots, end)

    def begins(self, rows: Array) -> tuple[Array, Array]:
        """The first known step of each one's episode, and how many steps earlier that is."""
        ring, first = self._ring, self._first.reshape(-1)
        behind = self._step(rows) - first[rows]
        begin = rows - behind * ring.slots
        while True:
            place = ring.preceding[begin // ring.rows_each]
            before = (place + 1) * ring.rows_each - ring.slots + begin % ring.slots
            more = (place != NOTHING) & (ring.next_rows(np.where(place != NOTHING, before, 0)) == begin)
            if not more.any():
                return begin, behind
            part = np.where(more, ring.steps - first[np.where(more, before, 0)], 0)
            behind = behind + part
            begin = np.where(more, before - (part - 1) * ring.slots, begin)

    def later(self, rows: Array, count: Array) -> Array:
        """The steps that are so many steps later in the same episode; they must be known."""
        ring, last = self._ring, self._last.reshape(-1)
        rows, count = rows.copy(), count.copy()
        while True:
            left = last[rows] - self._step(rows)
            beyond = count > left
            rows += np.minimum(count, left) * ring.slots
            if not beyond.any():
                return rows
            count = np.where(beyond, count - left - 1, 0)
            rows = np.where(beyond, ring.next_rows(rows), rows)

    def _step(self, rows: Array) -> Array:
        return rows % self._ring.rows_each // self._ring.slots


GoalReward = Callable[[Array, Array], tuple[Array, Array]]
"""`(achieved [B, …], desired [B, …])` → `(reward [B], terminated [B])`, for the goal achieved after the step."""


def goal_reward(config: HindsightReplay) -> GoalReward:
    """The function that the config names; raises `ConfigError` where it cannot be imported."""
    if config.reward == "sparse":
        return sparse(config.threshold, config.terminates)
    found: GoalReward = import_object(config.reward, "algorithm.replay_buffer.reward", kind="function")
    return found


def sparse(threshold: float | Sequence[float], terminates: bool) -> GoalReward:
    """0 where the goal is reached (shared/experience/goals.py), else −1; whether reaching it ends the episode."""

    def reward(achieved: Array, desired: Array) -> tuple[Array, Array]:
        reached = goals.reached(achieved, desired, threshold)
        return reached.astype(np.float32) - np.float32(1), reached & terminates

    return reward
