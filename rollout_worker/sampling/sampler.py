"""The sampler: environments × policies → the columns of one fragment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from stagecoach.rollout_worker.environments import vector_env
from stagecoach.rollout_worker.environments.seeding import SeedLineage, episode_seed
from stagecoach.rollout_worker.exploration.base import Exploration, Greedy, act_for, no_actions
from stagecoach.rollout_worker.gateway.environment import ExternalEnvironments
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
_LEAST_LOG_PROB = -1e4
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
        self, environment: vector_env.VectorEnvironment, description: EnvironmentDescription, lineage: SeedLineage,
        device: str = "cpu", trace: ActionTrace | None = None, stages: StageTimer | None = None,
        directors: Directors = _NONE, rows: int = 0,
    ) -> None:  # fmt: skip
        """Begins `lineage`, or resumes it where `trace` ends; `position_digest` shows whether it got there. With
        `rows`, a fragment has this T and ends where episodes do."""
        self.directors, self._seating, self._rows = directors, directors.seating, rows
        self._holdable = cast(vector_env.HoldableEnvironment, environment)
        self._external = environment if isinstance(environment, ExternalEnvironments) else None
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
                vector_env.reject_unusable_now(self._now, self._acts, self._description)
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
        small = {  # these act without PyTorch: all of their slots act, and they are simple enough
            policy_id: SmallNetwork.of(policy, exploration[policy_id], self._slots(policy_id), length, self._generator)
            for policy_id, policy in (policies.items() if not self._in_parts else ())
        }
        taken: list[dict[str, Columns]] = []
        remembering = with_states(policies, {policy_id: self._slots(policy_id) for policy_id in policies}, self._states)
        for policy_id, its in remembering.items():
            recorders[policy_id].began(its.state.cpu().numpy())
        asked = {**policies, **remembering}
        episodes: list[EpisodeRecord] = []
        by_episode = [its for its in exploration.values() if its.knows_episodes]
        for index in range(self._environment.num_envs):  # a lineage's first episodes begin only now
            self._begin(by_episode, index, drawn=not self._began)
        self._began = True
        for policy_id, way in exploration.items():
            if (carried := self._states.get(_CARRIED + policy_id)) is not None:
                way.take_up(policies[policy_id], carried)
        if self._pauses:
            self._environment.set_paused(False)
        acted = 0
        for step in range(length) if self._external is None else count():
            if not (stepped_now := self._acting(step, steps, recorders)):  # all wait for the next fragment
                break
            acted += stepped_now
            if self._seating is not None:  # opponents' observations are in no column
                vector_env.reject_unusable_now(self._now, self._acts, self._description)
            with acting:
                act = self._act_in_parts if self._in_parts else self._act
                actions = {
                    policy_id: act(step, policy_id, recorders, asked, exploration)
                    if (network := small.get(policy_id)) is None
                    else recorders[policy_id].acted(step, self._now[policy_id], network.act(self._now[policy_id]))
                    for policy_id in seated
                }
            if self._in_parts and self._external is None:
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
        vector_env.reject_unusable(columns, self._description)
        self._states = {policy_id: its.state for policy_id, its in remembering.items()}
        for policy_id, way in exploration.items():
            if (carried := way.carried()) is not None:
                self._states[_CARRIED + policy_id] = carried
        self._number += 1
        seconds = world.monotonic() - started
        if self._external is not None:
            acted = self._external.outcomes
        elif self._in_parts:
            self._taken = {
                policy_id: {name: np.stack([actions[policy_id][name] for actions in taken]) for name in its}
                for policy_id, its in taken[0].items()
            }
        return Sample(columns, tuple(episodes), acted, seconds, (self._stages.nanoseconds("env") - stepped) / 1e9)

    def _acting(self, step: int, steps: int, recorders: Recorders) -> int:
        """Returns the number of environments that act; in a fragment of whole episodes, fewer from `steps` on."""
        if self._external is not None:
            if step == 0:
                self._external.begin()
            full = {group: np.zeros(len(acts), np.bool_) for group, acts in self._acts.items()}
            for policy_id, recorder in recorders.items():
                full[self._seat(policy_id)] |= recorder.full
            if self._external.over(full):
                return 0
            self._acts = self._external.acts()
        if not self._rows:
            return self._environment.num_envs
        if step == steps - 1:
            self._holdable.hold(True)
        (acts,) = self._acts.values()
        return int(acts.sum())

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
        given = None
        if self._external is not None:
            given = self._external.given(group)
            self._external.learns[group][rows] = False
        for part in everyone if self._seating is None else self._seating.parts(group, rows):
            if part.player in policies:
                policy, learns = policies[part.player], part.learns
                before = policy.state if isinstance(policy, Stateful) else None
                picked, params = act_for(exploration[part.player], policy, now, part.rows, self._generator)
                if (tested := self._acts[group][part.rows] == vector_env.GREEDILY).any():
                    best = self._best(policy, before, now, part.rows[tested])
                    for name, array in best.items():
                        picked[name][tested] = array
                if self._external is not None and given is not None and (again := given[0][part.rows]).any():
                    for name, array in given[1].items():
                        picked[name][again] = array[part.rows[again]]
                    learns = learns & ~self._unlikely(exploration[part.player], policy, params, picked, again)
                    self._external.rejected[group][part.rows] = part.learns & ~learns
                its = part.rows[learns]
                seen = {name: array[its] for name, array in now.items()}
                done = {name: array[learns] for name, array in picked.items()}
                learning = torch.from_numpy(learns).to(params.device)
                states = None if before is None else before.cpu().numpy()
                drawn = ~tested[learns]
                recorders[part.player].acted_by(step, its, seen, done, params[learning], drawn, states)
                for name, array in picked.items():
                    actions[name][part.rows] = array
                if self._external is not None:
                    self._external.learns[group][its] = True
            else:
                opponents.append(part)
        if self._seating is not None:
            self._seating.act(opponents, group, now, policies[group], self._generator, actions)
            if given is not None:
                for name, array in given[1].items():
                    actions[name][given[0]] = array[given[0]]
        return actions

    def _unlikely(
        self, exploration: Exploration, policy: Policy, params: torch.Tensor, actions: Columns, given: Array
    ) -> Array:
        """Returns `[R]`: rows `given` by clients with actions that their policy would never have drawn: such a
        log-probability would cost the whole fragment."""
        tensors = {name: torch.from_numpy(array).to(params.device) for name, array in actions.items()}
        found = exploration.log_prob(policy, params, tensors).cpu().numpy()
        unlikely: Array = given & (found < _LEAST_LOG_PROB)
        return unlikely

    def _best(self, policy: Policy, before: torch.Tensor | None, now: Columns, rows: Array) -> Columns:
        """Returns the best actions of the slots `rows`, from the states `before` an exploration acted."""
        if isinstance(policy, Stateful) and before is not None:
            slots = torch.from_numpy(rows).to(self._device)
            policy.state = policy.state.index_copy(0, slots, before[slots])
        return act_for(_BEST, policy, now, rows, self._generator)[0]

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
        self._environment.set_phase(phase)

    def close(self) -> None:
        self._environment.close()
