"""Runs whose environments are in other programs: the client of clients/python plays through a real gateway."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from random import Random
from socket import SHUT_RDWR
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import gymnasium as gym
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from stagecoach.rollout_worker.gateway.tokens import add_token, revoke_token
from stagecoach.shared.protocol.heartbeat import Wait, poll
from stagecoach.shared.storage.log_archive import read_experience
from tests.support.runs.external_run import CHOICE, SPACES, client, free_port, learned, place_of, start, total
from tests.support.suite.speed import stretched

if TYPE_CHECKING:
    from stagecoach.coordinator.run_access.run import Run

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    environment = {"id": "mine", "api": "external", "num_envs": 8, "spaces": SPACES}
    run = start(tmp_path_factory.mktemp("gateway"), environment=environment)
    yield run
    run.stop()
    run.wait(60)


@pytest.fixture(scope="module")
def token(run: Run) -> str:
    return add_token(run.checkpoint_store().store, "robot")


def play(session: Any, episodes: int, seed: int = 0, pause: float = 0.0) -> int:
    """Counts: each observation names its session and turn. Returns how many turns had an outcome."""
    draw, turn, played = Random(seed), 0, 0
    for _ in range(episodes):
        session.reset([seed, turn])
        for left in reversed(range(draw.randint(1, 9))):
            time.sleep(pause * draw.random())
            turn, played = turn + 1, played + 1
            session.step(1.0, [seed, turn], left == 0)
        turn += 1
    return played


def test_turns_of_clients_are_learned_once_and_acknowledged(tmp_path: Path) -> None:
    run = start(tmp_path)
    token = add_token(run.checkpoint_store().store, "robot")
    sessions = [client.Session(place_of(run), token, f"s{seed}") for seed in range(2)]
    with ThreadPoolExecutor() as pool:
        played = list(pool.map(lambda session, seed: play(session, 30, seed), sessions, range(2)))
    assert [session.settle(stretched(30)) for session in sessions] == [0, 0]
    poll(Wait("all to be learned", stretched(30)), lambda: run.status().env_steps == sum(played))
    assert total(run)["balances"] and total(run)["consumed"]["transitions"] == sum(played)

    def told() -> bool:
        (progress,) = (beat.progress for beat in run.status().roles if beat.role == "worker")
        counts = progress.get("clients", {}).get("robot", {"turns": 0, "late": 0})
        return progress.get("sessions") == 2 and counts["turns"] + counts["late"] == sum(played)

    poll(Wait("the heartbeat to tell it", stretched(30)), told)
    from stagecoach.coordinator.page.prometheus import exposition
    from stagecoach.coordinator.page.view import RunView

    view = RunView(run)

    def waits_for_clients() -> (
        bool
    ):  # a heartbeat of the moment at which a turn was taken in says that nothing is waited for
        view.refresh()
        return "clients of the gateway (2 connected)" in view.state["bottleneck"]

    poll(Wait("the page to name the clients", stretched(30)), waits_for_clients)
    assert b'stagecoach_gateway_sessions{run="mine"} 2.0' in exposition([view])
    run.stop()
    run.wait(60)
    counted = learned(run)
    assert set(counted.values()) == {1} and len(counted) == sum(played)


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic abc"}])
def test_without_a_token_there_is_nothing_but_a_401(run: Run, header: dict[str, str]) -> None:
    with pytest.raises(InvalidStatus) as refused:
        connect(place_of(run), additional_headers=header)
    assert refused.value.response.status_code == 401


def test_plain_get_reports_whether_token_is_valid(run: Run, token: str) -> None:
    """A page in a browser is not shown the status of a WebSocket that was refused."""
    place = urlsplit(place_of(run))
    for its, status in (("wrong", 401), (token, 426)):
        with closing(HTTPConnection(place.netloc, timeout=stretched(20))) as connection:
            connection.request("GET", f"{place.path}?token={its}")
            answer = connection.getresponse()
        assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (status, "*")


def hello(**fields: Any) -> str:
    return json.dumps({"type": "hello", "protocol": 1, "session": "odd"} | fields)


RESET = json.dumps({"type": "reset", "seq": 0, "observation": [0, 0]})
STEP = {"type": "step", "seq": 0, "reward": 1, "observation": [0, 0]}


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([RESET], "hello"), ([hello(protocol=2)], "protocol"), ([hello(session="a/b")], "message"),
        ([hello(spaces={"observation": {}})], "spaces"), ([hello(), hello()], "hello"), ([b"\x00"], "message"),
        ([hello(session="new"), json.dumps(STEP)], "turn"), ([hello(), json.dumps(STEP | {"seq": 5})], "gap"),
        ([hello(), RESET, json.dumps(STEP | {"seq": 1, "observation": [1]})], "observation"),
        ([hello(), "x" * 100], "message"),
    ],
)  # fmt: skip
def test_misbehaving_client_is_told_why_and_costs_itself_alone(
    run: Run, token: str, messages: list[str | bytes], error: str
) -> None:
    well = client.Session(place_of(run), token, "well")
    well.reset([1, 1])
    with connect(place_of(run), additional_headers={"Authorization": f"Bearer {token}"}) as socket:
        for message in messages:
            socket.send(message)
        said = list[str | bytes]()
        with suppress(ConnectionClosed):
            said.extend(socket)
    assert json.loads(said[-1])["error"] == error
    well.step(1.0, [1, 2], True)
    well.close()


def test_larger_message_than_allowed_closes_the_connection(run: Run, token: str) -> None:
    with connect(place_of(run), additional_headers={"Authorization": f"Bearer {token}"}) as socket:
        socket.send("x" * 2_000_000)
        with pytest.raises(ConnectionClosed) as ended:
            socket.recv(timeout=stretched(20))
    assert ended.value.rcvd is not None and ended.value.rcvd.code == 1009


def test_cut_connection_continues_its_session(run: Run, token: str) -> None:
    session = client.Session(place_of(run), token, "cut")
    for turn in range(30):
        session.reset([0, turn]) if turn == 0 else session.step(0.0, [0, turn])
        if turn % 3 == 0:
            session._socket.socket.shutdown(SHUT_RDWR)  # noqa: SLF001 - the cut
    session.step(0.0, [0, 30], True)
    assert session.settle(stretched(30)) == 0
    session.close()


def test_revoked_client_is_cut_off(run: Run, token: str) -> None:
    store = run.checkpoint_store().store
    session = client.Session(place_of(run), add_token(store, "guest"), "0")
    session.reset([0, 0])
    revoke_token(store, "guest")
    with pytest.raises(client.GatewayRefused, match=r"revoked|token"):
        play(session, 1000, pause=0.2)


def test_client_has_a_bounded_number_of_connections(run: Run) -> None:
    """Twice the slots and eight, so that one client cannot take the connections of all."""
    header = {"Authorization": f"Bearer {add_token(run.checkpoint_store().store, 'many')}"}
    with ExitStack() as held:
        for _ in range(2 * 8 + 8):
            held.enter_context(connect(place_of(run), additional_headers=header))
        with pytest.raises(InvalidStatus) as refused:
            connect(place_of(run), additional_headers=header)
    assert refused.value.response.status_code == 503


def test_third_client_of_two_slots_is_refused_until_one_leaves(tmp_path: Path) -> None:
    run = start(tmp_path)
    token = add_token(run.checkpoint_store().store, "robot")
    first, second = (client.Session(place_of(run), token, name) for name in ("one", "two"))
    for session in (first, second):
        session.reset([0, 0])
    with pytest.raises(client.GatewayRefused, match="full"):
        client.Session(place_of(run), token, "three").reset([0, 0])
    first.step(0.0, [0, 1], True)
    assert first.settle(stretched(30)) == 0
    first.close()
    second.step(0.0, [0, 1], True)
    third, until = client.Session(place_of(run), token, "three"), time.monotonic() + stretched(30)
    while True:
        try:
            third.reset([0, 0])
            break
        except client.GatewayRefused:
            assert time.monotonic() < until
            time.sleep(0.2)
            third = client.Session(place_of(run), token, "three")
    for session in (second, third):
        session.close()
    run.stop()
    run.wait(60)


@pytest.mark.learning
def test_policy_learns_through_the_gateway(tmp_path: Path) -> None:
    """CartPole of Gymnasium, played by a client: it stands twice as long as at first."""
    spaces = {"observation": {"type": "Box", "low": -1e9, "high": 1e9, "shape": [4]}, "action": CHOICE}
    environment = {"id": "mine", "api": "external", "num_envs": 4, "spaces": spaces}
    algorithm = {"learning_rate": 1e-3, "gamma": 0.98, "gae_lambda": 0.8, "minibatch_size": 64, "epochs": 10}
    rollout = {"workers": 1, "fragment_steps": 32, "fragments_per_update": 1}
    run = start(tmp_path, environment=environment, algorithm=algorithm, rollout=rollout, seed=1)
    token, place = add_token(run.checkpoint_store().store, "robot"), place_of(run)
    returns: dict[int, list[float]] = {}

    def one(seed: int) -> None:
        returns[seed] = client.play(gym.make("CartPole-v1"), client.Session(place, token, str(seed)), 40, 1000 * seed)

    with ThreadPoolExecutor() as pool:
        list(pool.map(one, range(4)))
    run.stop()
    run.wait(60)
    first, last = (np.mean([its[part] for its in returns.values()]) for part in (slice(0, 10), slice(-10, None)))
    assert last > 2 * first, (first, last)


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_kills_of_gateway_trainer_and_redis_repeat_no_turn(tmp_path: Path) -> None:
    run = start(tmp_path, inline=False, gateway={"port": free_port(), "fragment_seconds": 2})
    token, place = add_token(run.checkpoint_store().store, "robot"), place_of(run)
    played: dict[int, int] = {}

    def one(seed: int) -> None:
        session = client.Session(place, token, str(seed), journal=tmp_path / f"journal-{seed}")
        played[seed] = play(session, 150, seed, pause=0.02)
        assert session.settle(stretched(60)) == 0

    with ThreadPoolExecutor() as pool:
        playing = [pool.submit(one, seed) for seed in range(2)]
        for name in ("worker-0", "trainer", "worker-0", "redis"):
            time.sleep(2.0)
            if name == "redis":
                pid = int(run.client.info("server")["process_id"])  # type: ignore[union-attr]
            else:
                pid = next(beat.pid for beat in run.status(accounting=False).roles if beat.id == name)
            os.kill(pid, signal.SIGKILL)
        for each in playing:
            each.result(stretched(240))
    run.stop()
    run.wait(120)
    counted, accounts = learned(run), total(run)
    assert set(counted.values()) == {1}
    late = accounts["dropped"].get("stale", {}).get("transitions", 0)
    assert len(counted) == accounts["consumed"]["transitions"]
    assert len(counted) + late == sum(played.values()) and accounts["balances"]


def test_client_ends_when_its_run_does(tmp_path: Path) -> None:
    run = start(tmp_path)
    token = add_token(run.checkpoint_store().store, "robot")
    session = client.Session(place_of(run), token, patience_seconds=stretched(20))
    seen = [0, 0]
    session.reset(seen)
    seen[0] = 7  # the journal keeps what was sent
    assert session._journal[0]["observation"] == [0, 0]  # noqa: SLF001
    run.stop()
    run.wait(60)
    with pytest.raises(client.GatewayRefused) as refused:
        session.step(1.0, seen)
    assert refused.value.code == "ended"


def test_pictures_travel_as_arrays(tmp_path: Path) -> None:
    """What is learned from is what the client has drawn, after a cut and from a journal's file as well."""
    picture = {"type": "Box", "low": 0, "high": 255, "shape": [20, 20], "dtype": "uint8"}
    environment = {"id": "mine", "api": "external", "num_envs": 2, "spaces": {"observation": picture, "action": CHOICE}}
    run = start(tmp_path, environment=environment)
    token = add_token(run.checkpoint_store().store, "robot")
    session = client.Session(place_of(run), token, journal=tmp_path / "journal")
    draw = np.random.default_rng(3)
    drawn = [draw.integers(0, 256, (20, 20), np.uint8) for _ in range(21)]
    session.reset(drawn[0])
    for number, seen in enumerate(drawn[1:], 1):
        session.step(1.0, seen, number == 20)
        if number == 10:
            session._socket.socket.shutdown(SHUT_RDWR)  # noqa: SLF001 - the cut
        if number == 15:
            session = client.Session(place_of(run), token, journal=tmp_path / "journal")  # as a new program
    assert session.settle(stretched(30)) == 0
    run.stop()
    run.wait(60)
    learned_from = {
        fragment.columns["default"]["obs"][row, slot].tobytes()
        for fragment in read_experience(run.folder.path / "s3" / "stagecoach" / run.run_id)
        for row, slot in np.argwhere(fragment.columns["default"]["mask"])
    }
    assert learned_from <= {seen.tobytes() for seen in drawn[:20]} and len(learned_from) > 10
