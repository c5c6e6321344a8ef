"""Games, matches and curricula through a gateway: a game's transitions are those of a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from stagecoach.rollout_worker.environments.space_data import data_of
from stagecoach.rollout_worker.gateway.tokens import add_token
from stagecoach.shared.protocol.heartbeat import Wait, poll
from stagecoach.shared.storage.log_archive import read_experience
from tests.support.environments.games import NAMES, AllAtOnce, InTurns, Nim
from tests.support.environments.lessons import Corridor
from tests.support.runs.external_run import client, place_of, start, total
from tests.support.suite.speed import stretched

pytestmark = pytest.mark.timeout(300)
Seen = tuple[float, ...]


class Outcome(NamedTuple):
    action: int
    reward: float
    terminated: bool
    truncated: bool
    after: Seen | None


def listed(observation: Any) -> Seen:
    return tuple(np.asarray(observation, np.float32).tolist())


class Remembered(AllAtOnce):
    """Remembers all transitions, by their observation, which none other has."""

    turns: dict[Seen, Outcome]

    def step(self, actions: dict[str, Any]) -> Any:
        before = {agent: self.seen(agent) for agent in actions}
        result = super().step(actions)
        after, rewards, terminated, truncated, _ = result
        for agent, action in actions.items():
            ended = bool(terminated[agent] or (agent not in self.agents and not truncated[agent]))
            last = None if ended else listed(after[agent])
            flags = ended, bool(truncated[agent])
            self.turns[listed(before[agent])] = Outcome(int(action), round(rewards[agent], 4), *flags, last)
        return result


class RememberedTurns(InTurns):
    """Remembers all turns, by their observation, with the outcome that `last` has at the agent's next one."""

    turns: dict[Seen, Outcome]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        super().reset(seed, options)
        self.acted: dict[str, tuple[Seen, int]] = {}

    def last(self, observe: bool = True) -> Any:
        found = observation, reward, terminated, truncated, _ = super().last()
        if (acted := self.acted.pop(self.agent_selection, None)) is not None:
            after = None if terminated else listed(observation)
            self.turns[acted[0]] = Outcome(acted[1], round(float(reward), 4), bool(terminated), bool(truncated), after)
        return found

    def step(self, action: Any) -> None:
        if action is not None:
            self.acted[self.agent_selection] = listed(self.seen(self.agent_selection)), int(action)
        super().step(action)


def spaces_of(env: Any) -> dict[str, Any]:
    seen, acted = env.observation_space, env.action_space
    agents = {
        agent: {"observation": data_of(seen(agent)), "action": data_of(acted(agent))} for agent in env.possible_agents
    }
    return {"agents": agents}


def started(folder: Path, env: Any, **sections: Any) -> Any:
    environment = {"id": "game", "api": "external", "num_envs": 2, "spaces": spaces_of(env)}
    return start(folder, environment=environment, **sections)


@pytest.mark.parametrize(
    ("game", "play"),
    [(Remembered, client.play_parallel), (RememberedTurns, client.play_turns)],
    ids=["at once", "turns"],
)
def test_transitions_equal_a_plain_loop(tmp_path: Path, game: Any, play: Callable[..., Any]) -> None:
    """Agents come, go, are born again and end in another's turn; two policies share them."""
    run = started(tmp_path, game(), policies={"one": {}, "other": {}}, agents={"ann": "one", "*": "other"})
    token, place = add_token(run.checkpoint_store().store, "robot"), place_of(run)
    games = [game() for _ in range(2)]

    def one(number: int) -> None:
        games[number].turns = {}
        session = client.Session(place, token, str(number), spaces=spaces_of(game()))
        play(games[number], session, 25, seed=1000 * number)
        assert session.settle(stretched(30)) == 0

    with ThreadPoolExecutor() as pool:
        list(pool.map(one, range(2)))
    expected = games[0].turns | games[1].turns
    accounts = total(run)
    late = accounts["dropped"].get("stale", {}).get("transitions", 0)
    poll(Wait("all to be learned", stretched(30)), lambda: run.status().env_steps == len(expected) - late)
    run.stop()
    run.wait(60)
    assert total(run)["balances"]
    found = set[Seen]()
    for fragment in read_experience(run.folder.path / "s3" / "stagecoach" / run.run_id):
        for policy_id, agents in (("one", NAMES[:1]), ("other", NAMES[1:])):
            found |= compared(fragment.columns[policy_id], agents, expected, found)
    assert len(found) == len(expected) - late > 200


def compared(columns: Any, agents: list[str], expected: dict[Seen, Outcome], before: set[Seen]) -> set[Seen]:
    """Compares a fragment's transitions with those expected; returns their observations."""
    finals = {(row, slot): listed(columns["final_obs"][at]) for at, (row, slot) in enumerate(columns["final_index"])}
    found = set[Seen]()
    for row, slot in np.argwhere(columns["mask"]):
        seen = listed(columns["obs"][row, slot])
        assert agents[slot // 2] == NAMES[int(seen[0])] and seen not in before | found
        turn, last = expected[seen], row + 1 == len(columns["mask"])
        after = finals.get((row, slot)) or listed(
            columns["bootstrap_obs"][slot] if last else columns["obs"][row + 1, slot]
        )
        flags = [bool(columns[name][row, slot]) for name in ("terminated", "truncated")]
        made = int(columns["action"][row, slot]), round(float(columns["reward"][row, slot]), 4), *flags
        assert made == turn[:4]
        assert turn.after is None or after == turn.after
        found.add(seen)
    return found


def test_league_plays_clients_games(tmp_path: Path) -> None:
    """Each match has a learner and an opponent; the outcome that the client tells decides it."""
    league = {"snapshot": {"every": "100 env_steps"}, "opponents": {"latest": 0.5, "past": 0.5}}
    run = started(
        tmp_path, Nim(), league=league, rollout={"workers": 1, "fragment_steps": 16, "fragments_per_update": 1}
    )
    token, place = add_token(run.checkpoint_store().store, "robot"), place_of(run)

    def one(number: int) -> None:
        session = client.Session(place, token, str(number))
        client.play_turns(Nim(tells=True), session, 80)
        session.settle(stretched(30))

    with ThreadPoolExecutor() as pool:
        list(pool.map(one, range(2)))
    run.stop()
    run.wait(60)
    accounts, matches = total(run), []
    assert accounts["balances"]
    for fragment in read_experience(run.folder.path / "s3" / "stagecoach" / run.run_id):
        matches += [record.match for record in fragment.header.episodes if record.match]
    assert len(matches) > 100 and {match.outcome for match in matches} == {(0.0, 1.0), (1.0, 0.0)}
    assert any(player != "default" for match in matches for player in match.players), "earlier versions play"


def test_curriculum_gives_lessons_to_clients(tmp_path: Path) -> None:
    """Each episode's record has the values that the client was given; the lessons go on."""
    first = {"choice": [2, 3], "until": {"success": 0.5, "episodes": 10}}
    parameters = {"length": {"lessons": [first, {"value": 4}]}, "wind": {"uniform": [0, 1]}}
    env = Corridor()
    spaces = {"observation": data_of(env.observation_space), "action": data_of(env.action_space)}
    environment = {"id": "game", "api": "external", "num_envs": 2, "spaces": spaces, "parameters": parameters}
    run = start(tmp_path, environment=environment, algorithm={"minibatch_size": 8, "epochs": 4, "learning_rate": 3e-3})
    session = client.Session(place_of(run), add_token(run.checkpoint_store().store, "robot"))
    client.play(env, session, 300)
    assert session.settle(stretched(30)) == 0
    run.stop()
    run.wait(60)
    records = [
        record
        for fragment in read_experience(run.folder.path / "s3" / "stagecoach" / run.run_id)
        for record in fragment.header.episodes
    ]
    assert len(records) > 280 and {record.lessons["length"] for record in records} == {0, 1}
    for record in records:
        given = [record.parameters[name] for name in ("length", "wind")]
        assert given == [record.metrics["given"], pytest.approx(record.metrics["blown"])]
        assert (record.parameters["length"] == 4) == (record.lessons["length"] == 1)
