"""The sampler: environments × policies → the columns of one fragment."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from rollout_worker.environments.seeding import SeedLineage, episode_seed
from rollout_worker.environments.vector_env import VectorEnvironment, reject_unusable
from rollout_worker.exploration.base import Exploration, act_for
from rollout_worker.sampling import action_trace
from rollout_worker.sampling.action_trace import ActionTrace
from rollout_worker.sampling.recorders import Recorder, TurnRecorder
from shared.experience.counters import Phase
from shared.experience.fragment import EpisodeRecord
from shared.experience.spaces import Columns, EnvironmentDescription
from shared.policies.actor_critic import Stateful, with_states
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
        self._acts = {policy_id: acts for policy_id, (_, acts) in began.items()}
        self._taken: dict[str, Columns] = {}
        """Of the last sample: what was done in each step `[T, S, …]`, where its columns do not tell."""
        states = trace.states if trace else {}
        self._states = {policy_id: torch.from_numpy(state).to(self._device) for policy_id, state in states.items()}

    @torch.inference_mode()
    def sample(self, policies: Mapping[str, Policy], exploration: Exploration, steps: int) -> Sample:
        """Acts `steps` steps in every environment; raises `EnvironmentFailure`, and then nothing was produced."""
        with self._stages.during("record"):
            try:
                return self._sample(policies, exploration, steps)
            except Exception:  # perhaps of a policy or an environment that was given NaN
                reject_unusable(self._now, self._description)
                raise

    def _sample(self, policies: Mapping[str, Policy], exploration: Exploration, steps: int) -> Sample:
        acting, stepping = self._stages.during("act"), self._stages.during("env")
        started, stepped = time.perf_counter(), self._stages.nanoseconds("env")
        self._generator.manual_seed(self.lineage.acting(self._number))
        kind = TurnRecorder if self._description.in_turns else Recorder
        recorders = {
            policy_id: kind(self._description, policy_id, steps, self._slots(policy_id), policies[policy_id].state_size)
            for policy_id in self._description.policies
        }
        taken: list[dict[str, Columns]] = []
        remembering = with_states(policies, {policy_id: self._slots(policy_id) for policy_id in policies}, self._states)
        for policy_id, its in remembering.items():
            recorders[policy_id].began(its.state.cpu().numpy())
        asked = {**policies, **remembering}
        episodes: list[EpisodeRecord] = []
        if exploration.knows_episodes:
            for index in range(self._environment.num_envs):
                self._begin(exploration, index)
        for step in range(steps):
            actions = {}
            for policy_id, recorder in recorders.items():
                with acting:
                    act = self._act_in_turns if isinstance(recorder, TurnRecorder) else self._act
                    actions[policy_id] = act(step, policy_id, recorder, asked[policy_id], exploration)
            taken.append(actions)
            with stepping:
                result = self._environment.step(actions)
            for policy_id, recorder in recorders.items():
                recorder.stepped(step, result.policies[policy_id])
                self._now[policy_id] = result.policies[policy_id].obs
                if (acts := result.policies[policy_id].acts) is not None:
                    self._acts[policy_id] = acts
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
        reject_unusable(columns, self._description)
        self._states = {policy_id: its.state for policy_id, its in remembering.items()}
        self._number += 1
        seconds = time.perf_counter() - started
        if self._description.in_turns:
            self._taken = {
                policy_id: {name: np.stack([actions[policy_id][name] for actions in taken]) for name in its}
                for policy_id, its in taken[0].items()
            }
        return Sample(columns, tuple(episodes), seconds, (self._stages.nanoseconds("env") - stepped) / 1e9)

    def _act(self, step: int, policy_id: str, recorder: Recorder, policy: Policy, exploration: Exploration) -> Columns:
        observations = self._now[policy_id]
        tensors = {name: torch.from_numpy(array).to(self._device) for name, array in observations.items()}
        chosen, params = exploration.act(policy, tensors, self._generator)
        actions = {name: tensor.cpu().numpy() for name, tensor in chosen.items()}
        recorder.acted(step, observations, actions, params)
        return actions

    def _act_in_turns(
        self, step: int, policy_id: str, recorder: Recorder, policy: Policy, exploration: Exploration
    ) -> Columns:
        """Acts for the slots whose turn it is; zeros for the others."""
        now, rows = self._now[policy_id], np.flatnonzero(self._acts[policy_id])
        states = policy.state.cpu().numpy() if isinstance(policy, Stateful) else None
        picked, params = act_for(exploration, policy, now, rows, self._generator)
        recorder.acted_by(step, rows, {name: array[rows] for name, array in now.items()}, picked, params, states)
        actions = {
            name: np.zeros((len(self._acts[policy_id]), *its.shape[1:]), its.dtype) for name, its in picked.items()
        }
        for name, array in picked.items():
            actions[name][rows] = array
        return actions

    def _begin(self, exploration: Exploration, index: int) -> None:
        """Tells which episode environment `index` is in."""
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
        actions = self._taken or {
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
