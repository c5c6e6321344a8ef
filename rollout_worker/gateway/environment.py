"""The environments of a gateway's clients, as the sampler steps them: each slot at the pace of its session.

A step answers the observations that were acted on, and then waits until clients have sent something. Rows are turns, as
in a game in turns; `mask` is true where a turn's outcome has come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stagecoach.rollout_worker.environments.pettingzoo_env import Episode
from stagecoach.rollout_worker.environments.vector_env import (
    PolicyStep,
    Position,
    RunningEpisodes,
    Step,
    episode_record,
    info_numbers,
    numbers,
)
from stagecoach.rollout_worker.gateway.messages import Arrival, plain, single_agent
from stagecoach.rollout_worker.gateway.sessions import Counts, Session, Sessions, Turn
from stagecoach.shared.base import world
from stagecoach.shared.base.errors import EnvironmentFailure
from stagecoach.shared.config.services import GatewayConfig
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.fragment import INFO, EpisodeRecord
from stagecoach.shared.experience.spaces import Array, Columns, EnvironmentDescription
from stagecoach.shared.protocol.experience_log import Settled
from stagecoach.shared.protocol.heartbeat import Heartbeat

_WAIT_SECONDS = 0.2
_IDLE_SECONDS = 1.0
_OUTCOME_SECONDS = 5.0
_HELD_SECONDS, _HELD_SHARE = 10.0, 0.1
"""Time for which fragments may wait for the outcomes of a client, at once and of all; then its turns are late."""
_MOST_METRICS, _LONGEST_NAME = 32, 100
"""Names in a client's `info` that become metrics: all clients share what a run may have."""


class NothingArrived(EnvironmentFailure):
    """Raised in place of an empty fragment."""


class ExternalEnvironments:
    """All slots of a gateway: slot = number of the agent within its policy × N + slot of the session. A fragment ends
    soon after a slot has its T rows, or after `fragment_seconds`."""

    def __init__(
        self, sessions: Sessions, description: EnvironmentDescription, num_envs: int, gateway: GatewayConfig,
        heartbeat: Heartbeat,
    ) -> None:  # fmt: skip
        self.num_envs, self.sessions, self.version = num_envs, sessions, -1
        self.policy: dict[str, Any] = {"type": "hold"}
        """The message for clients that act locally, about the version."""
        self._learns_late = gateway.late == "learn"
        self._description, self._heartbeat, self._seconds = description, heartbeat, gateway.fragment_seconds
        self._single = single_agent(description)
        self._places: dict[str, tuple[str, int]] = {}
        self._obs: dict[str, Columns] = {}
        self.rejected: dict[str, Array] = {}
        """Policy id → `[S]`: slots whose given action the policy would never have drawn."""
        self.learns: dict[str, Array] = {}
        """Policy id → `[S]`: the slots that were acted last by a policy that learns."""
        for policy_id in description.seated:
            agents = [agent for agent, its in description.agents.items() if its == policy_id]
            self._places |= {agent: (policy_id, number * num_envs) for number, agent in enumerate(agents)}
            slots = len(agents) * num_envs
            self._obs[policy_id] = description.policies[policy_id].observation.zeros("obs", slots)
            self.learns[policy_id], self.rejected[policy_id] = np.ones(slots, np.bool_), np.zeros(slots, np.bool_)
        self._began = self._last = self._waited = self._started = world.monotonic()
        self._held = False
        self._full_after: float | None = None
        """Seconds after which the first session had all its rows."""
        self.outcomes = 0
        """Turns in the present fragment that have their outcome and are learned from."""
        self._late = 0
        self.settled = Settled({}, 0)
        """Sessions and turns that count as settled from the last push on."""

    @property
    def position(self) -> Position | None:
        return None

    def reset(self, seeds: Sequence[int], past: RunningEpisodes | None = None) -> dict[str, tuple[Columns, Array]]:
        acts = self.acts()
        return {policy_id: (self._obs[policy_id], acts[policy_id]) for policy_id in self._obs}

    def begin(self) -> None:
        """Begins a fragment."""
        self._late += self.outcomes  # of a fragment that was not pushed
        self._began, self._held, self.outcomes = world.monotonic(), False, 0
        self._full_after = None
        for rejected in self.rejected.values():
            rejected[:] = False
        for session in self._all():
            was_cut, session.recorded, session.cut, session.full = session.cut, False, False, False
            if self._learns_late and self._single in session.turns:  # recorded anew, with the turns of this fragment
                turn = session.turns.pop(self._single)
                session.waiting = replace(turn.arrival, given={self._single: turn.action}, version=turn.version)
            self._give_up(session)
            if session.waiting is None:
                continue
            if self._is_late(session.waiting):
                self._count_late(session, len(session.waiting.acting))
                session.waiting = None
            elif was_cut:
                self._observe(session, session.waiting)
        self.sessions.post_local(self.policy)

    def _is_late(self, arrival: Arrival) -> bool:
        """Returns true for actions of another version, which this fragment cannot hold."""
        return arrival.given is not None and arrival.version != self.version and not self._learns_late

    def _count_late(self, session: Session, turns: int) -> None:
        self.sessions.count(session).late += turns
        self._late += turns

    def over(self, slots: Mapping[str, Array]) -> bool:
        """Returns whether the fragment is complete; `slots` `[S]` have all their rows. Before the end no turn begins,
        and open turns get some seconds.

        Raises `NothingArrived` in place of an empty fragment.
        """
        now, sessions = world.monotonic(), self._all()
        full = self._is_full(sessions, slots, now - self._began)
        pending = self._pending(sessions, now)
        idle = not self.outcomes and not pending and now - self._began > _IDLE_SECONDS
        nobody = all(its.cut or its.full or its.send is None for its in sessions) and any(its.cut for its in sessions)
        full = full or (self.outcomes > 0 and (nobody or self.sessions.settling))
        if not self._held and (full or idle or now - self._began > self._seconds):
            self._held, self._last = True, now
            if self.outcomes or pending:  # else the version stays, and clients may begin at any time
                self.hold()
        if not self._held or (pending and now - self._last <= _OUTCOME_SECONDS):
            return False
        for session in sessions if self.outcomes and (not self._learns_late or self._single is None) else ():
            self._give_up(session)
        self.settled = Settled({its.name: its.first_needed for its in sessions}, self._late)
        if not self.outcomes:
            raise NothingArrived("no client has sent an outcome")
        return True

    def _is_full(self, sessions: Sequence[Session], slots: Mapping[str, Array], seconds: float) -> bool:
        """Marks sessions with all rows of a slot. Once there is one, the others get half as long as it took."""
        for session in sessions:
            session.full = any(slots[its][at] for its, at in (self._place(session, agent) for agent in self._places))
        if self._full_after is None:
            if not any(its.full for its in sessions):
                return False
            self._full_after = seconds
        others = any(its.recorded and its.send is not None and not (its.full or its.cut) for its in sessions)
        return not others or seconds >= 1.5 * self._full_after

    def _pending(self, sessions: Sequence[Session], now: float) -> bool:
        """Returns whether the outcome of a turn is due, of a client that has not cost the others too much time yet."""
        slow = {its.client for its in sessions if its.turns and its.waiting is None}
        counts = [self.sessions.counts[client] for client in slow if client in self.sessions.counts]
        for its in counts if self._held else ():
            its.held += now - self._waited
        self._waited = now
        most = _HELD_SECONDS + _HELD_SHARE * (now - self._started)
        return len(counts) < len(slow) or any(its.held < most for its in counts)

    def hold(self) -> None:
        """Sends `hold` to clients that act locally, unless they may act by any version."""
        if not self._learns_late:
            self.sessions.post_local({"type": "hold"})

    @property
    def unsettled(self) -> bool:
        """True if turns came too late for any fragment, and none follows them."""
        return any(its.settled < self.settled.sessions.get(its.name, 0) for its in self._all())

    def pushed(self) -> None:
        """Acknowledges what is settled in the log."""
        self._late -= self.settled.late
        self.outcomes = 0
        self.sessions.pushed(self.settled.sessions)

    def _give_up(self, session: Session) -> None:
        """Counts open turns as late: their fragment ends, and the version that acted them goes."""
        self._count_late(session, sum(turn.learns for turn in session.turns.values()))
        session.turns.clear()

    def given(self, policy_id: str) -> tuple[Array, Columns]:
        """Slots of a policy that act next and have acted already, `[S]`, with their actions: of messages that were sent
        again."""
        slots = np.zeros(len(self.learns[policy_id]), np.bool_)
        actions = self._description.policies[policy_id].action.zeros("action", len(slots))
        for session in self._acting():
            assert session.waiting is not None
            for agent, its in (session.waiting.given or {}).items():
                its_policy, slot = self._place(session, agent)
                if its_policy == policy_id:
                    slots[slot] = True
                    for name, array in its.items():
                        actions[name][slot] = array
        return slots, actions

    def step(self, actions: Mapping[str, Columns]) -> Step:
        self._answer(actions)
        with self._heartbeat.waiting("a client's message", 2 * _WAIT_SECONDS + self._seconds):
            self.sessions.wait(world.monotonic() + _WAIT_SECONDS)
        step, finals = Step({}), dict[str, list[tuple[int, Columns]]]()
        for policy_id, before in self._obs.items():
            self._obs[policy_id] = {name: array.copy() for name, array in before.items()}
            step.policies[policy_id], finals[policy_id] = self._blank(policy_id), []
        for session in self._all():
            if session.inbox and session.waiting is None:
                self._take(session, session.take(), step, finals)
        acts = self.acts()
        for policy_id, made in step.policies.items():
            observation, last = self._description.policies[policy_id].observation, finals[policy_id]
            made.final_slots = np.array([slot for slot, _ in last], np.int32)
            names = zip(observation.column_names("final_obs"), observation.column_names("obs"), strict=True)
            made.final_obs = {
                final: np.stack([seen[name] for _, seen in last]) if last else made.obs[name][:0]
                for final, name in names
            }
            made.acts = acts[policy_id]
        return step

    def _blank(self, policy_id: str) -> PolicyStep:
        size = len(self.learns[policy_id])
        over, cut, mask = (np.zeros(size, np.bool_) for _ in range(3))
        info = {INFO + name: np.full(size, np.nan, np.float32) for name in self._description.info_columns}
        reward, nobody = np.zeros(size, np.float32), np.zeros(0, np.int32)
        return PolicyStep(self._obs[policy_id], reward, over, cut, mask, {}, nobody, info, in_turns=True)

    def _all(self) -> list[Session]:
        with self.sessions.changed:
            return list(self.sessions.by_name.values())

    def _acting(self) -> list[Session]:
        sessions = [] if self._held else self._all()
        return [its for its in sessions if its.waiting is not None and not (its.left or its.cut or its.full)]

    def _place(self, session: Session, agent: str) -> tuple[str, int]:
        policy_id, first = self._places[agent]
        return policy_id, first + session.slot

    def acts(self) -> dict[str, Array]:
        acts = {policy_id: np.zeros(len(its), np.bool_) for policy_id, its in self.learns.items()}
        for session in self._acting():
            assert session.waiting is not None
            for agent in session.waiting.acting:
                policy_id, slot = self._place(session, agent)
                acts[policy_id][slot] = True
        return acts

    def _answer(self, actions: Mapping[str, Columns]) -> None:
        """Sends the actions of the slots that have acted, and so begins their turns."""
        for session in self._acting():
            arrival = session.waiting
            assert arrival is not None
            session.waiting, chosen = None, {}
            for agent in arrival.acting:
                policy_id, slot = self._place(session, agent)
                columns = {name: its[slot] for name, its in actions[policy_id].items()}
                version = self.version if arrival.given is None else arrival.version
                session.turns[agent] = Turn(arrival, columns, version, bool(self.learns[policy_id][slot]))
                if self.rejected[policy_id][slot]:
                    self._count_late(session, 1)
                    session.cut = session.recorded
                    self.rejected[policy_id][slot] = False
                if arrival.given is None:
                    chosen[agent] = plain(self._description.policies[policy_id].action.to_environment(columns))
            if arrival.given is not None:
                self.sessions.count(session).older += arrival.version != self.version
            else:
                answer = {"actions": chosen} if self._single is None else {"action": chosen[self._single]}
                self.sessions.answered(session, arrival.seq, answer, self.version)

    def _take(
        self, session: Session, arrival: Arrival, step: Step, finals: Mapping[str, list[tuple[int, Columns]]]
    ) -> None:
        counts = self.sessions.count(session)
        session.taken = arrival.seq + 1
        if arrival.begins:
            self._begin(session, counts, step)
            session.parameters = session.drawn.get(arrival.episode or "")
            self.sessions.draw(session)
        elif session.episode is not None:
            session.episode.length += 1
            for agent, reward in arrival.rewards.items():
                session.episode.returns[agent] += reward
            session.episode.infos |= arrival.infos
        for agent, turn in [*session.turns.items()]:
            turn.reward += arrival.rewards.get(agent, 0.0)
            if agent in arrival.observations or agent in arrival.terminated or agent in arrival.truncated:
                self._close(session, agent, session.turns.pop(agent), arrival, step, finals)
        if arrival.ends:
            if session.episode is not None:
                step.episodes.append((session.slot, self._record(session, counts)))
            session.episode = None
            return
        if not session.cut:  # else the observation after the recorded turns is there already
            self._observe(session, arrival)
        if self._is_late(arrival):
            session.cut = session.recorded
            self._count_late(session, len(arrival.acting))
        else:
            session.waiting = arrival

    def _observe(self, session: Session, arrival: Arrival) -> None:
        for agent in arrival.acting:
            policy_id, slot = self._place(session, agent)
            for name, array in arrival.observations[agent].items():
                self._obs[policy_id][name][slot] = array

    def _begin(self, session: Session, counts: Counts, step: Step) -> None:
        for agent in self._places:
            policy_id, slot = self._place(session, agent)
            step.policies[policy_id].begun.append(slot)
            if (turn := session.turns.pop(agent, None)) is not None:
                counts.abandoned += turn.learns
                step.policies[policy_id].abandoned.append(slot)
        session.episode = Episode(0, {}, set(), dict.fromkeys(self._places, 0.0))

    def _close(
        self, session: Session, agent: str, turn: Turn, arrival: Arrival, step: Step,
        finals: Mapping[str, list[tuple[int, Columns]]],
    ) -> None:  # fmt: skip
        """Records the outcome of an agent's turn."""
        policy_id, slot = self._place(session, agent)
        made, seen = step.policies[policy_id], arrival.observations.get(agent)
        if seen is None and agent in arrival.truncated:  # the value of what follows is unknown
            self._count_late(session, turn.learns)
            made.abandoned.append(slot)
            return
        made.reward[slot], made.mask[slot] = turn.reward, True
        made.terminated[slot], made.truncated[slot] = agent in arrival.terminated, agent in arrival.truncated
        session.recorded = True
        self.sessions.count(session).turns += turn.learns
        self.outcomes += turn.learns
        names = self._description.info_columns
        for name, number in zip(made.info, info_numbers(arrival.infos.get(agent, {}), names), strict=True):
            made.info[name][slot] = number
        if made.over[slot] and seen is not None:
            finals[policy_id].append((slot, seen))

    def _record(self, session: Session, counts: Counts) -> EpisodeRecord:
        episode, agent = session.episode, self._single
        assert episode is not None
        if agent is None:
            record = episode.record()
        else:
            record = episode_record(episode.returns[agent], episode.length, numbers(episode.infos.get(agent, {})))
        for name in record.metrics:
            if len(counts.metrics) < _MOST_METRICS and len(name) <= _LONGEST_NAME:
                counts.metrics.add(name)
        record.metrics = {name: its for name, its in record.metrics.items() if name in counts.metrics}
        if (drawn := session.parameters) is not None:
            record.parameters, record.lessons = dict(drawn.values), dict(drawn.lessons)
        return record

    def set_phase(self, phase: Phase) -> None:
        """No-op: clients do not know phases."""

    def set_paused(self, paused: bool) -> bool:
        return False

    def close(self) -> None:
        """No-op: sessions outlive a restart of the environments."""
