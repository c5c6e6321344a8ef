"""Recorders: collect a policy's observations, actions and rewards, step by step, as its columns of a fragment."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stagecoach.rollout_worker.environments.vector_env import PolicyStep
from stagecoach.rollout_worker.exploration.base import Exploration
from stagecoach.shared.experience.fragment import INFO, LARGEST, STATE, expected_columns, kept_rows
from stagecoach.shared.experience.spaces import Array, Columns, EnvironmentDescription, SpaceSpec
from stagecoach.shared.policies.policy import Policy


class Recorder:
    """Recorder of a policy whose slots all act in each step."""

    def __init__(
        self, description: EnvironmentDescription, policy_id: str, steps: int, slots: int, state_size: int
    ) -> None:
        spaces = description.policies[policy_id]
        self._observation = spaces.observation
        expected = expected_columns(spaces, steps, slots, state_size, description.info_columns)
        self._final: dict[str, list[Array]] = {}
        for name in [*spaces.observation.column_names("final_obs"), "final_index"]:
            shape, dtype = expected.pop(name)
            self._final[name] = [np.zeros((0, *shape[1:]), dtype)]
        self.columns: Columns = {name: np.empty(shape, dtype) for name, (shape, dtype) in expected.items()}
        self._params: list[Tensor] = []

    def began(self, states: Array) -> None:
        """Records a recurrent policy's hidden states `[S, state size]` before the first step."""
        self.columns[STATE][:] = states

    def acted(self, step: int, observations: Columns, actions: Columns) -> Columns:
        for name, array in (*observations.items(), *actions.items()):
            self.columns[name][step] = array
        return actions

    def drawn_from(self, params: Tensor) -> None:
        self._params.append(params)

    def stepped(self, step: int, result: PolicyStep) -> None:
        for name in ("reward", "terminated", "truncated", "mask"):
            self.columns[name][step] = getattr(result, name)
        for name, array in result.info.items():
            self.columns[name][step] = array
        self._keep_finals(step, result)

    def _keep_finals(self, rows: Array | int, result: PolicyStep) -> None:
        """Records the last observations of a step; `rows` `[S]` are the rows of the slots' transitions, or of all."""
        slots = result.final_slots
        if not slots.size:
            return
        rows = np.broadcast_to(rows, result.mask.shape)
        kept = result.truncated[slots] | _holdable(self._observation, result.final_obs)
        for name, array in result.final_obs.items():
            self._final[name].append(array[kept])
        index = np.stack([rows[slots], slots], axis=1)[kept]
        self._final["final_index"].append(index.astype(np.int32))

    def finish(self, policy: Policy, exploration: Exploration, bootstrap: Columns) -> Columns:
        """Returns all columns: computes log-probabilities for all steps at once, and adds the last observations."""
        shape = self.columns["reward"].shape
        actions = {name: array.reshape(-1, *array.shape[2:]) for name, array in self._actions()}
        self.columns["log_prob"] = _log_prob(policy, exploration, torch.cat(self._params), actions).reshape(shape)
        return self._closed(bootstrap)

    def _closed(self, bootstrap: Columns) -> Columns:
        for name in self._observation.column_names("obs"):
            self.columns["bootstrap_" + name][:] = bootstrap[name]
        for name, parts in self._final.items():
            self.columns[name] = np.concatenate(parts)
        return self.columns

    def _actions(self) -> Iterator[tuple[str, Array]]:
        return ((name, array) for name, array in self.columns.items() if name.startswith("action"))


class PartRecorder(Recorder):
    """Recorder of a policy of whose slots only some act in a step; the others, such as an opponent's, are masked."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        for name, array in self.columns.items():
            array[...] = _nothing(name)
        shape = self.columns["reward"].shape
        self._numbers = np.full(shape, -1, np.int64)
        """Index of the parameters from which each row's action was drawn; -1 for none."""
        self._count = 0
        self._mine = np.zeros(shape[1], np.bool_)

    def _numbered(self, params: Tensor, drawn: Array) -> Array:
        self._params.append(params)
        self._count += len(params)
        return np.where(drawn, np.arange(self._count - len(params), self._count), -1)

    def acted_by(
        self, step: int, rows: Array, observations: Columns, actions: Columns, params: Tensor, drawn: Array,
        states: Array | None,
    ) -> None:  # fmt: skip
        """Records that only the slots `rows` `[R]` acted in this step; all but `states` `[S, …]` are `[R, …]`. The
        log-probability of an action that was not `drawn` from `params` is unknown."""
        self._mine[:] = False
        self._mine[rows] = True
        for name, array in (*observations.items(), *actions.items()):
            self.columns[name][step, rows] = array
        self._numbers[step, rows] = self._numbered(params, drawn)

    def stepped(self, step: int, result: PolicyStep) -> None:
        ours = self._mine[result.final_slots]
        final_obs = {name: array[ours] for name, array in result.final_obs.items()}
        flags = {name: getattr(result, name) & self._mine for name in ("mask", "terminated", "truncated")}
        kept = replace(result, **flags, final_slots=result.final_slots[ours], final_obs=final_obs)
        super().stepped(step, kept)
        self._mine[:] = False

    def finish(self, policy: Policy, exploration: Exploration, bootstrap: Columns) -> Columns:
        columns, there = self.columns, self.columns["mask"]
        blank = ~kept_rows(columns)
        for name, array in columns.items():
            if array.shape[:2] == there.shape and not name.startswith(("bootstrap", STATE)):  # which have no steps
                array[blank] = _nothing(name)
        if there.any():
            actions = {name: array[there] for name, array in self._actions()}
            numbers = self._numbers[there]
            params = torch.cat(self._params)[torch.from_numpy(numbers)]
            columns["log_prob"][there] = np.where(numbers < 0, np.nan, _log_prob(policy, exploration, params, actions))
        return self._closed(bootstrap)


class TurnRecorder(PartRecorder):
    """Recorder of agents that act in turns: row k of a slot is its k-th turn whose outcome came within the fragment;
    others are omitted, since the version that acted them is gone by then. The row after a slot's last one holds the
    observation of its next turn, as `bootstrap_obs` does; `mask` is false."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._filled = np.zeros(len(self._mine), np.int64)
        names = [*self._observation.column_names("obs"), *(name for name, _ in self._actions())]
        self._held = {name: np.zeros_like(self.columns[name][0]) for name in names}
        self._held_numbers = np.zeros(len(self._mine), np.int64)

    def began(self, states: Array) -> None:
        """No-op: a state is recorded when its slot first acts, since an episode may end before."""

    def acted_by(
        self, step: int, rows: Array, observations: Columns, actions: Columns, params: Tensor, drawn: Array,
        states: Array | None,
    ) -> None:  # fmt: skip
        self._mine[rows] = True
        for name, array in (*observations.items(), *actions.items()):
            self._held[name][rows] = array
        self._held_numbers[rows] = self._numbered(params, drawn)
        if states is not None:
            first = rows[self._filled[rows] == 0]
            self.columns[STATE][first] = states[first]

    @property
    def full(self) -> Array:
        """`[S]`: slots that have all their rows."""
        found: Array = self._filled >= len(self.columns["reward"])
        return found

    def _abandon(self, slot: int) -> None:
        """Truncates a slot's last row: its episode ends where the turn without an outcome began."""
        row = self._filled[slot] - 1
        if self._mine[slot] and row >= 0 and not (self.columns["terminated"] | self.columns["truncated"])[row, slot]:
            self.columns["truncated"][row, slot] = True
            for name in self._observation.column_names("obs"):
                self._final["final_" + name].append(self._held[name][[slot]])
            self._final["final_index"].append(np.array([[row, slot]], np.int32))
        self._mine[slot] = False

    def stepped(self, step: int, result: PolicyStep) -> None:
        for slot in result.abandoned:
            self._abandon(slot)
        slots = np.flatnonzero(result.mask & self._mine)
        rows = self._filled[slots]
        for name, held in self._held.items():
            self.columns[name][rows, slots] = held[slots]
        self._numbers[rows, slots] = self._held_numbers[slots]
        for name in ("reward", "terminated", "truncated", "mask"):
            self.columns[name][rows, slots] = getattr(result, name)[slots]
        for name, array in result.info.items():
            self.columns[name][rows, slots] = array[slots]
        ours = np.isin(result.final_slots, slots)
        final_obs = {name: array[ours] for name, array in result.final_obs.items()}
        self._keep_finals(self._filled, replace(result, final_slots=result.final_slots[ours], final_obs=final_obs))
        self._filled[slots] += 1
        self._mine[slots] = False

    def finish(self, policy: Policy, exploration: Exploration, bootstrap: Columns) -> Columns:
        names = self._observation.column_names("obs")
        after = {name: bootstrap[name].copy() for name in names}
        for name in names:
            after[name][self._mine] = self._held[name][self._mine]
        steps = len(self.columns["reward"])
        slots = np.flatnonzero((self._filled > 0) & (self._filled < steps))
        for name in names:
            self.columns[name][self._filled[slots], slots] = after[name][slots]
        return super().finish(policy, exploration, after)


def _nothing(name: str) -> float:
    """Returns the value of a column where no agent acted: NaN for numbers of the `info`, else 0."""
    return np.nan if name.startswith(INFO) else 0.0


def _log_prob(policy: Policy, exploration: Exploration, params: Tensor, actions: Columns) -> Array:
    given = {name: torch.from_numpy(array).to(params.device) for name, array in actions.items()}
    return exploration.log_prob(policy, params, given).to(torch.float32).cpu().numpy()


def _holdable(spec: SpaceSpec, final: Columns) -> Array:
    """Returns `[M]`: the last observations `final_obs…` that a fragment can hold. A simulator may terminate with NaN, a
    table of states with one state too many; nothing is bootstrapped from these, so they count as unknown."""
    found = np.ones(len(next(iter(final.values()))), np.bool_)
    for leaf in spec.leaves:
        array = final[leaf.column("final_obs")]
        if leaf.kind != "box":
            good = (array >= 0) & (array < np.asarray(leaf.nvec).reshape(leaf.shape))
        elif array.dtype.kind == "f":
            good = np.abs(array) <= LARGEST
        else:
            continue
        found &= good.reshape(len(found), -1).all(axis=1)
    return found
