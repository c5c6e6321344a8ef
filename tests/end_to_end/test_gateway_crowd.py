"""Many clients behind a network that fails, while gateway, trainer and Redis are killed: each turn is learned once.

By hand with more of it: `CROWD_CLIENTS=50 CROWD_SECONDS=600 pytest -m '' tests/end_to_end/test_gateway_crowd.py`.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from socket import SHUT_RDWR
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from stagecoach.rollout_worker.gateway.tokens import add_token
from stagecoach.shared.protocol.heartbeat import Wait, poll
from tests.support.runs.external_run import SPACES, client, free_port, learned, place_of, start, total
from tests.support.services.fault_proxy import FaultProxy
from tests.support.suite.speed import stretched

if TYPE_CHECKING:
    from stagecoach.coordinator.run_access.run import Run

CLIENTS, SECONDS = int(os.environ.get("CROWD_CLIENTS", "50")), float(os.environ.get("CROWD_SECONDS", "50"))
AWAY_CLIENTS, AWAY_SECONDS = 3, max(8.0, SECONDS / 6)
"""Clients that are silent for a quarter longer than `gateway.away_seconds`: by then others may have their slots."""
ROLES = ("worker-0", "trainer", "redis")
pytestmark = [pytest.mark.timeout(900 + SECONDS), pytest.mark.nightly, pytest.mark.ray]


def played(session: Any, seed: int, seconds: float) -> int:
    """Plays with observations that name the session and the turn; returns how many turns had an outcome."""
    random, turn, outcomes, until = Random(seed), 0, 0, time.monotonic() + seconds
    away_at = time.monotonic() + seconds / 3 if seed < AWAY_CLIENTS else float("inf")
    while time.monotonic() < until:
        session.reset([seed, turn])
        for left in reversed(range(random.randint(1, 19))):
            if time.monotonic() > away_at:
                away_at = float("inf")
                with suppress(AttributeError, OSError):  # there is no connection just now
                    session._socket.socket.shutdown(SHUT_RDWR)  # noqa: SLF001 - the cut
                time.sleep(1.25 * AWAY_SECONDS)
            time.sleep(0.25 * random.random())
            turn, outcomes = turn + 1, outcomes + 1
            session.step(1.0, [seed, turn], left == 0)
        turn += 1
    return outcomes


def disturb(run: Run, proxy: FaultProxy, seconds: float) -> Counter[str]:
    """Cuts, delays, half-opens and kills; returns how often."""
    random, done, until = Random(7), Counter[str](), time.monotonic() + seconds
    while time.monotonic() < until:
        fault = random.choice(("cut", "delay", "half-open", "torn reply"))
        if fault == "cut":
            proxy.cut()
        elif fault == "delay":
            proxy.delay(0.2, 0.2)
        elif fault == "half-open":
            proxy.black_hole()
        else:
            proxy.cut_reply(random.randint(1, 200))
        done[fault] += 1
        time.sleep(1.0 + 2.0 * random.random())
        proxy.heal()
        role = ROLES[sum(done[its] for its in ROLES) % len(ROLES)]
        with suppress(Exception):  # it has not come back yet
            if role == "redis":
                pid = int(run.client.info("server")["process_id"])  # type: ignore[union-attr]
            else:
                pid = next(beat.pid for beat in run.status(accounting=False).roles if beat.id == role and beat.alive)
            os.kill(pid, signal.SIGKILL)
            done[role] += 1
        time.sleep(1.0 + 2.0 * random.random())
    return done


def test_crowd_behind_a_failing_network_is_learned_once(tmp_path: Path) -> None:
    run = start(
        tmp_path, inline=False, environment={"id": "mine", "api": "external", "num_envs": CLIENTS, "spaces": SPACES},
        gateway={"port": free_port(), "fragment_seconds": 2, "away_seconds": AWAY_SECONDS},
        algorithm={"minibatch_size": 8, "epochs": 1},
    )  # fmt: skip
    token, place = add_token(run.checkpoint_store().store, "robot"), place_of(run)
    proxy = FaultProxy(urlsplit(place).port or 0)

    def one(seed: int) -> int:
        session = client.Session(
            f"ws://127.0.0.1:{proxy.port}/v1/play", token, str(seed), journal=tmp_path / f"journal-{seed}"
        )
        outcomes = played(session, seed, SECONDS)
        assert session.settle(stretched(120)) == 0
        session.close()
        return outcomes

    try:
        with ThreadPoolExecutor(CLIENTS) as pool:
            playing = [pool.submit(one, seed) for seed in range(CLIENTS)]
            done = disturb(run, proxy, SECONDS)
            outcomes = sum(each.result(stretched(400)) for each in playing)
    finally:
        proxy.close()

    def settled() -> int:
        accounts = total(run)
        late: int = accounts["dropped"].get("stale", {}).get("transitions", 0)
        return int(accounts["consumed"]["transitions"]) + late

    poll(Wait("all turns to be learned or counted", stretched(60)), lambda: settled() >= outcomes)
    run.stop()
    run.wait(120)
    counted, accounts = learned(run), total(run)
    print(f"{outcomes} turns, {len(counted)} learned, {dict(done)}, {proxy.cuts} connections cut, {accounts}")
    assert set(counted.values()) == {1} and len(counted) == accounts["consumed"]["transitions"]
    assert settled() == outcomes and accounts["balances"]
    assert min(done[its] for its in ROLES) >= 2
    assert run.replay("start", "latest").equal
