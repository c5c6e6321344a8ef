"""The sampler: environments × policies → the columns of one fragment.

It keeps its environments running between fragments, so that episodes go on across them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollout_worker import trail
from rollout_worker.exploration import Exploration
from rollout_worker.trail import Life, Trail
from rollout_worker.vector import PolicyStep, VectorEnvironment, refuse_unusable
from shared.fragment import LARGEST, STATE, EpisodeRecord, expected_columns
from shared.policies.policy import Policy
from shared.policies.registry import torch_device
from shared.policies.stateful import with_states
from shared.spaces import Array, Columns, EnvironmentDescription, PolicySpaces, SpaceSpec
from shared.stages import Stages


@dataclass
class Sample:
    """What one fragment holds, before its header."""

    columns: dict[str, Columns]
    episodes: tuple[EpisodeRecord, ...]
    acting_seconds: float
    environment_seconds: float


class Sampler:
    """Steps its environments for one fragment at a time."""

    def __init__(
        self,
        environment: VectorEnvironment,
        description: EnvironmentDescription,
        life: Life,
        device: str = "cpu",
        past: Trail | None = None,
        stages: Stages | None = None,
    ) -> None:
        """Begins `life`; or takes it up where a predecessor's trail ends: `stands` tells whether it came there."""
        self._stages = stages or Stages()
        self._environment = environment
        self._description = description
        self._device = torch_device(device)
        self._generator = torch.Generator(self._device)
        self.life = life
        self._number = past.number if past else 0
        self._seeds = life.environments(environment.num_envs)
        self._episodes = list(past.past.episodes) if past else [0] * environment.num_envs
        began = environment.reset(self._seeds, past.past if past else None)
        self._now = {policy_id: observations for policy_id, (observations, _) in began.items()}
        self._states = {
            policy_id: torch.from_numpy(state).to(self._device)
            for policy_id, state in (past.states if past else {}).items()
        }

    @torch.inference_mode()
    def sample(self, policies: Mapping[str, Policy], exploration: Exploration, steps: int) -> Sample:
        """Acts `steps` steps in every environment; raises `EnvironmentFailure`, and then nothing was produced."""
        with self._stages.during("record"):
            try:
                return self._sample(policies, exploration, steps)
            except Exception:  # perhaps of a policy or an environment that was given NaN
                refuse_unusable(self._now, self._description)
                raise

    def _sample(self, policies: Mapping[str, Policy], exploration: Exploration, steps: int) -> Sample:
        acting, stepping = self._stages.during("act"), self._stages.during("env")
        started, stepped = time.perf_counter(), self._stages.nanoseconds("env")
        self._generator.manual_seed(self.life.acting(self._number))
        recorders = {
            policy_id: _Recorder(spaces, steps, self._slots(policy_id), policies[policy_id].state_size)
            for policy_id, spaces in self._description.policies.items()
        }
        remembering = with_states(policies, {policy_id: self._slots(policy_id) for policy_id in policies}, self._states)
        for policy_id, its in remembering.items():
            recorders[policy_id].columns[STATE][:] = its.state.cpu().numpy()
        asked = {**policies, **remembering}
        episodes: list[EpisodeRecord] = []
        if exploration.knows_episodes:
            for index in range(self._environment.num_envs):
                self._begin(exploration, index)
        for step in range(steps):
            actions = {}
            for policy_id, recorder in recorders.items():
                observations = self._now[policy_id]
                with acting:
                    tensors = {name: torch.from_numpy(array).to(self._device) for name, array in observations.items()}
                    chosen, params = exploration.act(asked[policy_id], tensors, self._generator)
                    actions[policy_id] = {name: tensor.cpu().numpy() for name, tensor in chosen.items()}
                recorder.acted(step, observations, actions[policy_id], params)
            with stepping:
                result = self._environment.step(actions)
            for policy_id, recorder in recorders.items():
                recorder.stepped(step, result.policies[policy_id])
                self._now[policy_id] = result.policies[policy_id].obs
            for policy_id, its in remembering.items():
                its.forget(torch.from_numpy(result.policies[policy_id].over).to(self._device))
            for index, record in result.episodes:
                episodes.append(record)
                self._episodes[index] += 1
                if exploration.knows_episodes:
                    self._begin(exploration, index)
        columns = {
            policy_id: recorder.finish(policies[policy_id], exploration, self._now[policy_id])
            for policy_id, recorder in recorders.items()
        }
        refuse_unusable(columns, self._description)
        self._states = {policy_id: its.state for policy_id, its in remembering.items()}
        self._number += 1
        seconds = time.perf_counter() - started
        return Sample(columns, tuple(episodes), seconds, (self._stages.nanoseconds("env") - stepped) / 1e9)

    def _begin(self, exploration: Exploration, index: int) -> None:
        """Tells which episode environment `index` is in."""
        exploration.begin(index, trail.episode_seed(self._seeds[index], self._episodes[index]))

    def _slots(self, policy_id: str) -> int:
        return self._environment.num_envs * self._description.slots(policy_id)

    @property
    def stands(self) -> str:
        """A digest of what is observed now; a successor that comes to the same place sees the same."""
        place = self._environment.place
        return "" if place is None else trail.digest(self._now, place.returns)

    def trace(self, sample: Sample) -> trail.Step | None:
        """The part of the trail that goes with the last sample; None for environments that leave none."""
        place = self._environment.place
        if place is None:
            return None
        actions = {
            policy_id: {
                name: columns[name] for name in self._description.policies[policy_id].action.column_names("action")
            }
            for policy_id, columns in sample.columns.items()
        }
        number = self._number - 1
        states = {policy_id: state.cpu().numpy() for policy_id, state in self._states.items()}
        return trail.Step(self.life, number, place.episodes, place.lengths, self.stands, actions, states)

    def close(self) -> None:
        """Ends the environments."""
        self._environment.close()


class _Recorder:
    """The preallocated columns of one policy id."""

    def __init__(self, spaces: PolicySpaces, steps: int, slots: int, state_size: int) -> None:
        self._observation = spaces.observation
        expected = expected_columns(spaces, steps, slots, state_size)
        growing = {leaf.column("final_obs") for leaf in spaces.observation.leaves} | {"final_index"}
        self.columns: Columns = {
            name: np.empty(shape, dtype) for name, (shape, dtype) in expected.items() if name not in growing
        }
        self._final: dict[str, list[Array]] = {name: [] for name in growing}
        self._empty = {name: np.zeros((0, *expected[name][0][1:]), expected[name][1]) for name in growing}
        self._params: list[Tensor] = []

    def acted(self, step: int, observations: Columns, actions: Columns, params: Tensor) -> None:
        for name, array in observations.items():
            self.columns[name][step] = array
        for name, array in actions.items():
            self.columns[name][step] = array
        self._params.append(params)

    def stepped(self, step: int, result: PolicyStep) -> None:
        for name in ("reward", "terminated", "truncated", "mask"):
            self.columns[name][step] = getattr(result, name)
        if result.final_slots.size:
            slots = result.final_slots
            kept = result.truncated[slots] | _holdable(self._observation, result.final_obs)
            for name, array in result.final_obs.items():
                self._final[name].append(array[kept])
            index = np.stack([np.full_like(slots, step), slots], axis=1)[kept]
            self._final["final_index"].append(index.astype(np.int32))

    def finish(self, policy: Policy, exploration: Exploration, bootstrap: Columns) -> Columns:
        """Log-probabilities for all steps at once, the observation after the last step, and the final ones."""
        steps, slots = self.columns["reward"].shape
        actions = {
            name: torch.from_numpy(array).flatten(0, 1).to(self._params[0].device)
            for name, array in self.columns.items()
            if name.startswith("action")
        }
        log_prob = exploration.log_prob(policy, torch.cat(self._params), actions)
        self.columns["log_prob"] = log_prob.reshape(steps, slots).to(torch.float32).cpu().numpy()
        for name in self._observation.column_names("obs"):
            self.columns["bootstrap_" + name][:] = bootstrap[name]
        for name, parts in self._final.items():
            self.columns[name] = np.concatenate(parts) if parts else self._empty[name]
        return self.columns


def _holdable(spec: SpaceSpec, final: Columns) -> Array:
    """`[M]`: which last observations `final_obs…` a fragment can hold.

    A simulator that fell over may terminate with NaN, a table of states with one state too many. Nothing is
    bootstrapped from these: they are left out as unknown instead of costing the fragment.
    """
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
