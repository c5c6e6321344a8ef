"""The sampler: environments × policies → the columns of one fragment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from stagecoach.rollout_worker.environments.seeding import SeedLineage, episode_seed
from stagecoach.rollout_worker.environments.vector_env import (
    GREEDILY,
    HoldableEnvironment,
    VectorEnvironment,
    reject_unusable,
    reject_unusable_now,
)
from stagecoach.rollout_worker.exploration.base import Exploration, Greedy, act_for, no_actions
from stagecoach.rollout_worker.sampling import action_trace
from stagecoach.rollout_worker.sampling.action_trace import ActionTrace
from stagecoach.rollout_worker.sampling.director import Directors, Part
from stagecoach.rollout_worker.sampling.recorders import PartRecorder, Recorder, TurnRecorder
from stagecoach.rollout_worker.sampling.small_networks import SmallNetwork
from stagecoach.shared.base import world
from stagecoach.shared.base.stage_timer import StageTimer
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.fragment import EpisodeRecord
from stagecoach.shared.experience.spaces import Array, Columns, EnvironmentDescription
from stagecoach.shared.policies.actor_critic import Stateful, with_states
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.registry import torch_device

_BEST = Greedy()
_NONE = Directors()
_CARRIED = "exploration of "
"""Prefix of a policy id in the states of an action trace."""
Recorders: TypeAlias = Mapping[str, Any]
"""Policy id → its recorder, of a kind that fits how the policy acts."""


@dataclass
class Sample:
    """Content of one fragment, without its header."""

    columns: dict[str, Columns]
    episodes: tuple[EpisodeRecord, ...]
    transitions: int
    """Steps of its environments."""
    acting_seconds: float
    environment_seconds: float


class Sampler:
    def __init__(
        self, environment: VectorEnvironment, description: EnvironmentDescription, lineage: SeedLineage,
        device: str = "cpu", trace: ActionTrace | None = None, stages: StageTimer | None = None,
        directors: Directors = _NONE, rows: int = 0,
    ) -> None:  # fmt: skip
        """Begins `lineage`, or resumes it where `trace` ends; `position_digest` shows whether it got there.

        With `rows`, a fragment has this T and ends where episodes do.
        """
        self.directors, self._seating, self._rows = directors, directors.seating, rows
        self._holdable = cast(HoldableEnvironment, environment)
        self._in_parts = description.in_turns or directors.seating is not None or rows > 0
        """True if only some slots of a policy act in a step."""
        self._environment, self._description = environment, description
        self._device, self._stages = torch_device(device), stages or StageTimer()
        self._generator = torch.Generator(self._device)
        self.lineage = lineage
        self._number = trace.number + 1 if trace else 0
        states = trace.states if trace else {}
        if trace:
            directors.take_up(trace.directed, states)
        self._seeds = lineage.environments(environment.num_envs)
        self._episodes = list(trace.episodes) if trace else [0] * environment.num_envs
        began = environment.reset(self._seeds, trace)
        self._now = {policy_id: observations for policy_id, (observations, _) in began.items()}
        self._acts = {policy_id: acts for policy_id, (_, acts) in began.items()}
        self._pauses = environment.set_paused(True)
        """True if any environment has `set_paused`."""
        self._taken: dict[str, Columns] = {}
        """Actions of the last sample `[T, S, …]`, if its columns do not hold all of them."""
        self._states = {policy_id: torch.from_numpy(state).to(self._device) for policy_id, state in states.items()}
        self._began = trace is not None

    @torch.inference_mode()
    def sample(self, policies: Mapping[str, Policy], exploration: Mapping[str, Exploration], steps: int) -> Sample:
        """Acts `steps` steps in every environment, each policy by its exploration; in a fragment of whole episodes also
        the rest of those that run then. Raises `EnvironmentFailure`, and then nothing was produced."""
        with self._stages.during("record"):
            try:
                return self._sample(policies, exploration, steps)
            except Exception:  # a policy or an environment may have been given NaN
                reject_unusable_now(self._now, self._acts, self._description)
                raise

    def _sample(self, policies: Mapping[str, Policy], exploration: Mapping[str, Exploration], steps: int) -> Sample:
        acting, stepping = self._stages.during("act"), self._stages.during("env")
        started, stepped = world.monotonic(), self._stages.nanoseconds("env")
        self._generator.manual_seed(self.lineage.acting(self._number))
        kind = TurnRecorder if self._description.in_turns else PartRecorder if self._in_parts else Recorder
        length, seated = self._rows or steps, self._description.seated
        recorders = {
            policy_id: kind(self._description, policy_id, length, self._slots(policy_id), policy.state_size)
            for policy_id, policy in policies.items()
        }
        small = {policy_id: self._small(policy_id, policies, exploration, length) for policy_id in policies}
        taken: list[dict[str, Columns]] = []
        remembering = with_states(policies, {policy_id: self._slots(policy_id) for policy_id in policies}, self._states)
        for policy_id, its in remembering.items():
            recorders[policy_id].began(its.state.cpu().numpy())
        asked = {**policies, **remembering}
        episodes: list[EpisodeRecord] = []
        by_episode = [its for its in exploration.values() if its.knows_episodes]
        self._begin_all(by_episode)
        for policy_id, way in exploration.items():
            if (carried := self._states.get(_CARRIED + policy_id)) is not None:
                way.take_up(policies[policy_id], carried)
        if self._pauses:
            self._environment.set_paused(False)
        acted = 0
        for step in range(length):
            if not (stepped_now := self._acting(step, steps)):  # all wait for the next fragment
                break
            acted += stepped_now
            if self._seating is not None:  # opponents' observations are in no column
                reject_unusable_now(self._now, self._acts, self._description)
            with acting:
                act = self._act_in_parts if self._in_parts else self._act
                actions = {
                    policy_id: act(step, policy_id, recorders, asked, exploration)
                    if (network := small.get(policy_id)) is None
                    else recorders[policy_id].acted(step, self._now[policy_id], network.act(self._now[policy_id]))
                    for policy_id in seated
                }
            if self._in_parts:
                taken.append(actions)
            with stepping:
                result = self._environment.step(actions)
            for policy_id, recorder in recorders.items():
                recorder.stepped(step, result.policies[self._seat(policy_id)])
            for policy_id in seated:
                self._now[policy_id] = result.policies[policy_id].obs
                if (acts := result.policies[policy_id].acts) is not None:
                    self._acts[policy_id] = acts
                if self._seating is not None:
                    self._seating.forget(policy_id, result.policies[policy_id].over)
            for policy_id, its in remembering.items():
                its.forget(torch.from_numpy(result.policies[self._seat(policy_id)].over).to(self._device))
            for index, record in result.episodes:
                episodes.append(record if self._seating is None else self._seating.judged(index, record))
                self._episodes[index] += 1
                self._begin(by_episode, index)
        if self._rows:
            self._holdable.hold(False)
            self._acts = {policy_id: np.ones_like(acts) for policy_id, acts in self._acts.items()}
        if self._pauses:
            self._environment.set_paused(True)
        for policy_id, network in small.items():
            if network is not None:
                recorders[policy_id].drawn_from(network.params)
        columns = {
            policy_id: recorder.finish(policies[policy_id], exploration[policy_id], self._observed(policy_id))
            for policy_id, recorder in recorders.items()
        }
        reject_unusable(columns, self._description)
        self._states = {policy_id: its.state for policy_id, its in remembering.items()}
        for policy_id, way in exploration.items():
            if (carried := way.carried()) is not None:
                self._states[_CARRIED + policy_id] = carried
        self._number += 1
        seconds = world.monotonic() - started
        if self._in_parts:
            self._taken = {
                policy_id: {name: np.stack([actions[policy_id][name] for actions in taken]) for name in its}
                for policy_id, its in taken[0].items()
            }
        return Sample(columns, tuple(episodes), acted, seconds, (self._stages.nanoseconds("env") - stepped) / 1e9)

    def _acting(self, step: int, steps: int) -> int:
        """Returns the number of environments that act; in a fragment of whole episodes, fewer from `steps` on."""
        if not self._rows:
            return self._environment.num_envs
        if step == steps - 1:
            self._holdable.hold(True)
        (acts,) = self._acts.values()
        return int(acts.sum())

    def _small(
        self, policy_id: str, policies: Mapping[str, Policy], exploration: Mapping[str, Exploration], steps: int
    ) -> SmallNetwork | None:
        """Returns what acts for a policy without PyTorch, if all of its slots act and it is simple enough."""
        if self._in_parts:
            return None
        rows = self._slots(policy_id)
        return SmallNetwork.of(policies[policy_id], exploration[policy_id], rows, steps, self._generator)

    def _act(
        self, step: int, policy_id: str, recorders: Recorders, policies: Mapping[str, Policy],
        exploration: Mapping[str, Exploration],
    ) -> Columns:  # fmt: skip
        observations = self._now[policy_id]
        tensors = {name: torch.from_numpy(array).to(self._device) for name, array in observations.items()}
        chosen, params = exploration[policy_id].act(policies[policy_id], tensors, self._generator)
        recorders[policy_id].drawn_from(params)
        actions = {name: tensor.cpu().numpy() for name, tensor in chosen.items()}
        recorded: Columns = recorders[policy_id].acted(step, observations, actions)
        return recorded

    def _act_in_parts(
        self, step: int, group: str, recorders: Recorders, policies: Mapping[str, Policy],
        exploration: Mapping[str, Exploration],
    ) -> Columns:  # fmt: skip
        """Acts for the policy's slots whose turn it is; zeros for the others."""
        now, rows = self._now[group], np.flatnonzero(self._acts[group])
        everyone = [Part(group, rows, np.ones(len(rows), np.bool_))] if len(rows) else []
        actions = no_actions(self._description.policies[group].action, len(self._acts[group]))
        opponents = []
        for part in everyone if self._seating is None else self._seating.parts(group, rows):
            if part.player in policies:
                policy, its = policies[part.player], part.rows[part.learns]
                before = policy.state if isinstance(policy, Stateful) else None
                picked, params = act_for(exploration[part.player], policy, now, part.rows, self._generator)
                if (tested := self._acts[group][part.rows] == GREEDILY).any():
                    best = self._best(policy, before, now, part.rows[tested])
                    for name, array in best.items():
                        picked[name][tested] = array
                seen = {name: array[its] for name, array in now.items()}
                done = {name: array[part.learns] for name, array in picked.items()}
                learning = torch.from_numpy(part.learns).to(params.device)
                states = None if before is None else before.cpu().numpy()
                drawn = ~tested[part.learns]
                recorders[part.player].acted_by(step, its, seen, done, params[learning], drawn, states)
                for name, array in picked.items():
                    actions[name][part.rows] = array
            else:
                opponents.append(part)
        if self._seating is not None:
            self._seating.act(opponents, group, now, policies[group], self._generator, actions)
        return actions

    def _best(self, policy: Policy, before: torch.Tensor | None, now: Columns, rows: Array) -> Columns:
        """Returns the best actions of the slots `rows`, from the states `before` an exploration acted."""
        if isinstance(policy, Stateful) and before is not None:
            slots = torch.from_numpy(rows).to(self._device)
            policy.state = policy.state.index_copy(0, slots, before[slots])
        return act_for(_BEST, policy, now, rows, self._generator)[0]

    def _begin_all(self, explorations: Sequence[Exploration]) -> None:
        """Announces the running episodes; a lineage's first episodes begin only now."""
        for index in range(self._environment.num_envs):
            self._begin(explorations, index, drawn=not self._began)
        self._began = True

    def _begin(self, explorations: Sequence[Exploration], index: int, drawn: bool = True) -> None:
        """Announces the episode of environment `index`; players are `drawn` if it begins now."""
        if not explorations and self._seating is None:
            return
        seed = episode_seed(self._seeds[index], self._episodes[index])
        for exploration in explorations:
            exploration.begin(index, seed)
        if self._seating is not None and drawn:
            self._seating.begin(index, self._episodes[index], seed)

    def _seat(self, policy_id: str) -> str:
        return self._description.seats.get(policy_id, policy_id)

    def _observed(self, policy_id: str) -> Columns:
        """Returns the current observations of a policy's slots; zeros for an opponent's seats, as in its rows."""
        now = self._now[seat := self._seat(policy_id)]
        if self._seating is None:
            return now
        others = ~self._seating.learning(seat, policy_id)
        now = {name: array.copy() for name, array in now.items()}
        for array in now.values():
            array[others] = 0
        return now

    def _slots(self, policy_id: str) -> int:
        return self._environment.num_envs * self._description.slots(policy_id)

    @property
    def position_digest(self) -> str:
        """Digest of the current observations, compared when a successor resumes the episodes."""
        place = self._environment.position
        return "" if place is None else action_trace.digest(self._now, place.returns)

    def traced(self, sample: Sample) -> ActionTrace | None:
        """Returns the last sample's part of the trace; None for environments without a position."""
        place = self._environment.position
        if place is None:
            return None
        actions = self._taken or {
            policy_id: {name: sample.columns[policy_id][name] for name in spaces.action.column_names("action")}
            for policy_id, spaces in self._description.policies.items()
        }
        if place.state:
            actions = {id_: {name: array[:0] for name, array in its.items()} for id_, its in actions.items()}
        states = {policy_id: state.cpu().numpy() for policy_id, state in self._states.items()}
        objects: list[str] = []
        if self._seating is not None:
            states |= self._seating.remembered()
            objects = sorted(self._seating.objects())
        return ActionTrace(
            place.episodes, place.lengths, actions, self.lineage, self._number - 1, self.position_digest, states,
            self.directors.trace(), objects, state=place.state,
        )  # fmt: skip

    def set_phase(self, phase: Phase) -> None:
        """Raises `EnvironmentFailure`."""
        self._environment.set_phase(phase)

    def close(self) -> None:
        self._environment.close()
