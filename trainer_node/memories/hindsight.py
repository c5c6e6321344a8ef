"""Hindsight experience replay (Andrychowicz et al. 2017) for goal environments.

Of each batch a fraction is drawn as if another goal had been desired: one that was achieved after a step of the same
episode. Reward and termination under it follow from what is achieved after each step: an episode that ended because its
own goal was reached goes on under another one; one that terminated for another reason ends there under any. Where it is
not known what a terminated step led to, such a step keeps its goal, gives none, and a relabelled n-step return ends
before it. Of an episode that is still going on, or whose beginning has left the memory, the part that is known counts
as the episode.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from shared.errors import ConfigError
from shared.spaces import Array, PolicySpaces
from trainer_node.memories.batch import Batch
from trainer_node.memories.episode_spans import EpisodeSpans
from trainer_node.memories.goal_rewards import GoalReward
from trainer_node.memories.replay import ReplayMemory, Rewards, discounted

ACHIEVED, DESIRED = "obs.achieved_goal", "obs.desired_goal"
Strategy = Literal["future", "final", "episode"]


class HindsightMemory(ReplayMemory):
    """Draws uniformly, and relabels. Sequences keep their goals."""

    def __init__(
        self,
        spaces: PolicySpaces,
        steps: int,
        slots: int,
        capacity: int,
        *,
        strategy: Strategy,
        relabelled_fraction: float,
        reward: GoalReward,
    ) -> None:
        super().__init__(spaces, steps, slots, capacity)
        goals = {leaf.column("obs"): leaf.shape for leaf in spaces.observation.leaves}
        if ACHIEVED not in goals or goals[ACHIEVED] != goals.get(DESIRED):
            raise ConfigError(
                f"a hindsight memory needs observations with achieved_goal and desired_goal of equal shape, found "
                f"{goals}; use a goal environment or another algorithm.memory.kind"
            )
        self._strategy, self._fraction, self._reward = strategy, relabelled_fraction, reward
        self._spans = EpisodeSpans(self.ring)

    def _placed(self, place: int) -> None:
        self._spans.put(place)

    def sample(
        self,
        count: int,
        generator: np.random.Generator,
        *,
        gamma: float,
        n_step: int = 1,
        beta: float = 1.0,
        as_now: Rewards | None = None,
    ) -> Batch:
        rows, weight = self._draw(count, generator, beta)
        path, valid = self._paths(rows, n_step)
        reward = self.ring.column("reward", path)
        over = self.ring.column("terminated", path)
        which, sources = self._sources(rows, generator)
        goals = self.ring.next_observations(sources, ACHIEVED)[ACHIEVED]
        if len(which):
            valid[:, which], reward[:, which], over[:, which] = self._again(
                path[:, which], valid[:, which] & ~self.ring.next_unknown(path[:, which]), goals
            )
        reward = reward if as_now is None else as_now(reward)
        depth, columns = valid.sum(axis=0) - 1, np.arange(count)
        outcome = discounted(reward, valid, over[depth, columns], gamma)
        batch = self._batch(rows, path[depth, columns], outcome, weight)
        batch.observations[DESIRED][which] = goals
        batch.next_observations[DESIRED][which] = goals
        return batch

    def _sources(self, rows: Array, generator: np.random.Generator) -> tuple[Array, Array]:
        """Which of the batch get another goal, and the steps after which these were achieved."""
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
        """What the steps `[n, M]` would have been with these goals `[M, …]`: valid, reward, terminated."""
        rows = path.reshape(-1)
        achieved = self.ring.next_observations(rows, ACHIEVED)[ACHIEVED]
        desired = np.broadcast_to(goals, (*path.shape, *goals.shape[1:])).reshape(achieved.shape)
        reward, over = self._judged(achieved, desired)
        if len(ended := np.flatnonzero(self.ring.column("terminated", rows))):
            own = self.ring.observations(rows[ended])[DESIRED]
            over[ended] |= ~self._judged(achieved[ended], own)[1]
        over = over.reshape(path.shape)
        valid = valid.copy()
        for step in range(1, len(path)):
            valid[step] &= valid[step - 1] & ~over[step - 1]
        return valid, reward.reshape(path.shape), over

    def _judged(self, achieved: Array, desired: Array) -> tuple[Array, Array]:
        """Reward (float32) and whether the goal ends the episode (bool), both `[B]`, of goals `[B, …]`."""
        reward, over = (np.asarray(part) for part in self._reward(achieved, desired))
        if reward.shape != (len(achieved),) or over.shape != (len(achieved),):
            raise ValueError(f"the goal reward answered {len(achieved)} goals with {reward.shape} and {over.shape}")
        return reward.astype(np.float32), over.astype(np.bool_)
