"""The sampler: environments × policies → the columns of one fragment."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollout_worker.environments.seeding import SeedLineage, episode_seed
from rollout_worker.environments.vector_env import PolicyStep, VectorEnvironment, reject_unusable
from rollout_worker.exploration.base import Exploration
from rollout_worker.sampling import action_trace
from rollout_worker.sampling.action_trace import ActionTrace
from shared.experience.counters import Phase
from shared.experience.fragment import LARGEST, STATE, EpisodeRecord, expected_columns
from shared.experience.spaces import Array, Columns, EnvironmentDescription, SpaceSpec
from shared.policies.actor_critic import with_states
from shared.policies.policy import Policy
from shared.policies.registry import torch_device
from shared.runtime.stage_timer import StageTimer


@dataclass
class Sample:
    """What one fragment holds, before its header."""

    columns: dict[str, Columns]
    episodes: tuple[EpisodeRecord, ...]
    acting_seconds: float
    environment_seconds: float


class Sampler:
    def __init__(
        self, environment: VectorEnvironment, description: EnvironmentDescription, lineage: SeedLineage,
        device: str = "cpu", trace: ActionTrace | None = None, stages: StageTimer | None = None,
    ) -> None:  # fmt: skip
        """Begins `lineage`, or takes it up where `trace` ends; `position_digest` tells whether it got there."""
        self._environment, self._description = environment, description
        self._device, self._stages = torch_device(device), stages or StageTimer()
        self._generator = torch.Generator(self._device)
        self.lineage = lineage
        self._number = trace.number + 1 if trace else 0
        self._seeds = lineage.environments(environment.num_envs)
        self._episodes = list(trace.episodes) if trace else [0] * environment.num_envs
        began = environment.reset(self._seeds, trace)
        self._now = {policy_id: observations for policy_id, (observations, _) in began.items()}
        states = trace.states if trace else {}
        self._states = {policy_id: torch.from_numpy(state).to(self._device) for policy_id, state in states.items()}

    @torch.inference_mode()
    def sample(self, policies: Mapping[str, Policy], exploration: Mapping[str, Exploration], steps: int) -> Sample:
        """Acts `steps` steps in every environment, each policy by its exploration; raises `EnvironmentFailure`, and
        then nothing was produced."""
        with self._stages.during("record"):
            try:
                return self._sample(policies, exploration, steps)
            except Exception:  # perhaps of a policy or an environment that was given NaN
                reject_unusable(self._now, self._description)
                raise

    def _sample(self, policies: Mapping[str, Policy], exploration: Mapping[str, Exploration], steps: int) -> Sample:
        acting, stepping = self._stages.during("act"), self._stages.during("env")
        started, stepped = time.perf_counter(), self._stages.nanoseconds("env")
        self._generator.manual_seed(self.lineage.acting(self._number))
        recorders = {
            policy_id: _Recorder(
                self._description, policy_id, steps, self._slots(policy_id), policies[policy_id].state_size
            )
            for policy_id in self._description.policies
        }
        remembering = with_states(policies, {policy_id: self._slots(policy_id) for policy_id in policies}, self._states)
        for policy_id, its in remembering.items():
            recorders[policy_id].columns[STATE][:] = its.state.cpu().numpy()
        asked = {**policies, **remembering}
        episodes: list[EpisodeRecord] = []
        by_episode = [its for its in exploration.values() if its.knows_episodes]
        for index in range(self._environment.num_envs):
            self._begin(by_episode, index)
        for step in range(steps):
            actions = {}
            for policy_id, recorder in recorders.items():
                observations = self._now[policy_id]
                with acting:
                    tensors = {name: torch.from_numpy(array).to(self._device) for name, array in observations.items()}
                    chosen, params = exploration[policy_id].act(asked[policy_id], tensors, self._generator)
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
                self._begin(by_episode, index)
        columns = {
            policy_id: recorder.finish(policies[policy_id], exploration[policy_id], self._now[policy_id])
            for policy_id, recorder in recorders.items()
        }
        reject_unusable(columns, self._description)
        self._states = {policy_id: its.state for policy_id, its in remembering.items()}
        self._number += 1
        seconds = time.perf_counter() - started
        return Sample(columns, tuple(episodes), seconds, (self._stages.nanoseconds("env") - stepped) / 1e9)

    def _begin(self, explorations: Sequence[Exploration], index: int) -> None:
        """Tells which episode environment `index` is in."""
        for exploration in explorations:
            exploration.begin(index, episode_seed(self._seeds[index], self._episodes[index]))

    def _slots(self, policy_id: str) -> int:
        return self._environment.num_envs * self._description.slots(policy_id)

    @property
    def position_digest(self) -> str:
        """Of what is observed now; a successor that comes to the same place sees the same."""
        place = self._environment.position
        return "" if place is None else action_trace.digest(self._now, place.returns)

    def traced(self, sample: Sample) -> ActionTrace | None:
        """The last sample's part of the trace; None for environments that leave none."""
        place = self._environment.position
        if place is None:
            return None
        actions = {
            policy_id: {name: sample.columns[policy_id][name] for name in spaces.action.column_names("action")}
            for policy_id, spaces in self._description.policies.items()
        }
        states = {policy_id: state.cpu().numpy() for policy_id, state in self._states.items()}
        last = self._number - 1
        return ActionTrace(place.episodes, place.lengths, actions, self.lineage, last, self.position_digest, states)

    def set_phase(self, phase: Phase) -> None:
        """Raises `EnvironmentFailure`."""
        self._environment.set_phase(phase)

    def close(self) -> None:
        self._environment.close()


class _Recorder:
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

    def acted(self, step: int, observations: Columns, actions: Columns, params: Tensor) -> None:
        for name, array in (*observations.items(), *actions.items()):
            self.columns[name][step] = array
        self._params.append(params)

    def stepped(self, step: int, result: PolicyStep) -> None:
        for name in ("reward", "terminated", "truncated", "mask"):
            self.columns[name][step] = getattr(result, name)
        for name, array in result.info.items():
            self.columns[name][step] = array
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
            self.columns[name] = np.concatenate(parts)
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
