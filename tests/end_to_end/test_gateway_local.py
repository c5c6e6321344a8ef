"""Clients that act themselves: with the policy's file, through cuts, and with actions of any version."""

from __future__ import annotations

import json
import time
from pathlib import Path
from random import Random
from socket import SHUT_RDWR
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from websockets.sync.client import connect

from stagecoach.rollout_worker.gateway.tokens import add_token
from stagecoach.shared.protocol.heartbeat import Wait, poll
from stagecoach.shared.storage.log_archive import read_experience
from tests.support.runs.external_run import SPACES, client, client_module, learned, place_of, start, total
from tests.support.suite.speed import stretched

pytestmark = pytest.mark.timeout(300)
Policy = client_module("stagecoach_policy").Policy
DQN: dict[str, Any] = {
    "algorithm": {"name": "dqn", "minibatch_size": 8}, "heatup": {"duration": "16 env_steps"},
    "rollout": {"workers": 1, "fragment_steps": 8, "fragments_per_update": 1},
}  # fmt: skip


def test_client_that_acts_itself_learns_cartpole(tmp_path: Path) -> None:
    """On-policy: turns of a former version are counted, not learned from."""
    acted = {"type": "Discrete", "n": 2}
    seen = {"type": "Box", "low": -1e9, "high": 1e9, "shape": [4]}
    run = start(
        tmp_path, environment={"id": "mine", "api": "external", "spaces": {"observation": seen, "action": acted}},
        algorithm={"learning_rate": 1e-3, "gamma": 0.98, "gae_lambda": 0.8, "minibatch_size": 64, "epochs": 10},
        rollout={"workers": 1, "fragment_steps": 64, "fragments_per_update": 1}, seed=1,
    )  # fmt: skip
    session = client.Session(place_of(run), add_token(run.checkpoint_store().store, "robot"), policy=Policy)
    returns = client.play(gym.make("CartPole-v1"), session, 150, 1)
    assert session.settle(stretched(30)) == 0
    run.stop()
    run.wait(60)
    accounts = total(run)
    stale = accounts["dropped"].get("stale", {}).get("transitions", 0)
    assert accounts["balances"] and accounts["consumed"]["transitions"] + stale == sum(returns)
    assert stale < 0.1 * sum(returns)
    assert np.mean(returns[-10:]) > 2 * np.mean(returns[:10])


def test_idle_session_hears_of_its_version_once(tmp_path: Path) -> None:
    run = start(tmp_path)
    headers = {"Authorization": f"Bearer {add_token(run.checkpoint_store().store, 'robot')}"}
    with connect(place_of(run), additional_headers=headers) as socket:
        socket.send(json.dumps({"type": "hello", "protocol": 1, "session": "arm", "acting": "local"}))
        poll(Wait("a policy", stretched(30)), lambda: json.loads(socket.recv())["type"] == "policy")
        with pytest.raises(TimeoutError):
            pytest.fail(f"heard {socket.recv(timeout=4)!r}")
    run.stop()
    run.wait(60)


def counting(session: Any, turns: int, first: int = 0) -> None:
    """Plays a game whose observations count its turns; an episode has ten."""
    for turn in range(first, first + turns):
        session.reset([0, turn]) if turn % 10 == 0 else session.step(1.0, [0, turn], turn % 10 == 9)


def test_client_acts_on_while_its_gateway_is_away(tmp_path: Path) -> None:
    """With a replay buffer, what was acted offline is learned from as it arrives."""
    run = start(tmp_path, **DQN, gateway={"port": 0, "late": "learn", "fragment_seconds": 2})
    session = client.Session(place_of(run), add_token(run.checkpoint_store().store, "robot"), policy=Policy)
    counting(session, 100)
    place, session._url = session._url, "ws://127.0.0.1:9/v1/play"  # noqa: SLF001 - nobody is there
    session._socket.socket.shutdown(SHUT_RDWR)  # noqa: SLF001 - the cut
    counting(session, 500, first=100)
    session._url = place  # noqa: SLF001
    time.sleep(1.1)  # it tries once a second
    counting(session, 100, first=600)
    session.leave()
    counting(session, 100, first=700)
    assert len(session.journal) >= 100
    session.join()
    assert session.settle(stretched(60)) == 0
    poll(Wait("all to be learned", stretched(60)), lambda: total(run)["consumed"]["transitions"] == 80 * 9)

    def told() -> bool:
        (progress,) = (beat.progress for beat in run.status().roles if beat.role == "worker")
        return bool(progress.get("clients", {}).get("robot", {}).get("older", 0) > 100)

    poll(Wait("the heartbeat to tell turns of earlier versions", stretched(30)), told)
    run.stop()
    run.wait(60)
    counted = learned(run)
    assert set(counted.values()) == {1} and len(counted) == 80 * 9, "all turns, once each"
    assert total(run)["balances"]


def test_turns_of_other_versions_leave_no_false_transitions(tmp_path: Path) -> None:
    """A client mixes turns that it was answered with those of versions that are not there. Rows of a fragment stay
    successive turns, and its bootstrap is the observation after the last one."""
    run = start(tmp_path)
    token, random, versions, acted = add_token(run.checkpoint_store().store, "robot"), Random(5), [-1], 0
    with connect(place_of(run), additional_headers={"Authorization": f"Bearer {token}"}) as socket:
        socket.send(json.dumps({"type": "hello", "protocol": 1, "session": "0"}))
        for turn in range(600):
            message: dict[str, Any] = {"type": "step", "seq": turn, "observation": [0, turn]}
            message |= {"type": "reset"} if turn % 50 == 0 else {"reward": 1.0, "terminated": turn % 50 == 49}
            ends, known = message.get("terminated", False), random.random() < 0.6
            if not ends and not known:
                message |= {"action": 1, "version": random.choice([10**6, versions[-1], max(versions)]) % 2**40}
            socket.send(json.dumps(message))
            acted += not ends
            while known and not ends:
                said = json.loads(socket.recv(timeout=stretched(30)))
                if said["type"] == "action":
                    versions.append(said["version"])
                    break
        assert poll_learned(run, acted)
    run.stop()
    run.wait(60)
    rows = 0
    for fragment in read_experience(run.folder.path / "s3" / "stagecoach" / run.run_id):
        columns = fragment.columns["default"]
        for slot in range(2):
            kept = np.flatnonzero(columns["mask"][:, slot])
            turns, ended = columns["obs"][kept, slot, 1], columns["terminated"][kept, slot]
            rows += len(kept)
            assert all(
                after == before + 1 or over for before, after, over in zip(turns, turns[1:], ended, strict=False)
            )
            if len(kept) and not ended[-1]:
                last = len(kept) == len(columns["mask"])
                after = columns["bootstrap_obs"][slot, 1] if last else columns["obs"][len(kept), slot, 1]
                assert after == turns[-1] + 1
    assert rows > 100
    assert set(learned(run).values()) == {1}


def test_late_turns_without_followers_are_settled(tmp_path: Path) -> None:
    run = start(tmp_path)
    token = add_token(run.checkpoint_store().store, "robot")
    with connect(place_of(run), additional_headers={"Authorization": f"Bearer {token}"}) as socket:
        socket.send(json.dumps({"type": "hello", "protocol": 1, "session": "arm", "acting": "local"}))
        acted = {"action": 1, "version": 10**6}
        messages: list[dict[str, Any]] = [
            {"type": "reset", **acted}, {"type": "step", "reward": 1.0, **acted},
            {"type": "step", "reward": 1.0, "terminated": True},
        ]  # fmt: skip
        for seq, message in enumerate(messages):
            socket.send(json.dumps({"seq": seq, "observation": [0, seq], **message}))
        while (said := json.loads(socket.recv(timeout=stretched(30))))["type"] != "acknowledged" or said["seq"] < 3:
            pass
    run.stop()
    run.wait(60)
    dropped: Any = total(run)["dropped"]
    assert dropped["stale"] == {"fragments": 0, "transitions": 2}


def poll_learned(run: Any, acted: int) -> bool:
    """Waits until all turns are learned from or counted as late."""

    def settled() -> bool:
        accounts = total(run)
        stale = accounts["dropped"].get("stale", {}).get("transitions", 0)
        return bool(accounts["consumed"]["transitions"] + stale == acted)

    poll(Wait("all turns to be learned or late", stretched(30)), settled)
    return True


def test_impossible_action_costs_its_turn_alone(tmp_path: Path) -> None:
    """A client claims an answer that no policy draws; another one's turns in the same fragments are learned."""
    acted = {"type": "Box", "low": -1e4, "high": 1e4, "shape": [1]}
    environment = {"id": "mine", "api": "external", "num_envs": 2, "spaces": SPACES | {"action": acted}}
    run = start(tmp_path, environment=environment)
    token = add_token(run.checkpoint_store().store, "robot")
    good = client.Session(place_of(run), token, "good")
    with connect(place_of(run), additional_headers={"Authorization": f"Bearer {token}"}) as socket:
        socket.send(json.dumps({"type": "hello", "protocol": 1, "session": "bad"}))
        good.reset([1, 0])
        for turn in range(40):
            message = {"type": "step" if turn else "reset", "seq": turn, "observation": [2, turn]}
            message |= {"action": [9e3], "version": good.version} | ({"reward": 1.0} if turn else {})
            socket.send(json.dumps(message))
            good.step(1.0, [1, turn + 1], turn == 39)
    assert good.settle(stretched(30)) == 0
    run.stop()
    run.wait(60)
    turns = learned(run)
    assert {turn for who, turn in turns if who == 1} <= set(range(40)) and len(turns) > 20
    assert not [turn for who, turn in turns if who == 2]
    assert total(run)["dropped"].get("magnitude") is None and total(run)["balances"]
