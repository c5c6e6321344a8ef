"""Ranks as processes of their own that find each other over Redis, and lose each other: the weights are the same."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.services import new_secret
from coordinator.status import bottleneck
from rollout_worker.making import describe_environment
from rollout_worker.worker import Worker
from shared.checkpoint import ENVIRONMENT, FINISHED
from shared.config import Config
from shared.config_sources import dump_config
from shared.connection import Address
from shared.errors import Fenced
from shared.events import read_events
from shared.heartbeat import Beat, read_heartbeats
from shared.ledger import read_books
from shared.role import open_role
from tests.conftest import RedisServer, create_flow
from tests.support.speed import stretched
from tests.trainer_node.game import POLICY, small
from trainer_node.group import Invitation
from trainer_node.rendezvous import Rendezvous
from trainer_node.replay import replay

pytestmark = pytest.mark.timeout(600)
_DEADLINE_SECONDS = stretched(150.0)


class Crew:
    """One run: a trainer and its ranks in processes of their own, and a worker that is stepped here."""

    def __init__(self, server: RedisServer, folder: Path, config: Config) -> None:
        folder.mkdir()
        (folder / "store").mkdir()
        (folder / "config.yaml").write_text(dump_config(config))
        (folder / "keys.json").write_text(json.dumps({"redis_password": server.password}))
        store, run_id = f"file://{folder / 'store'}", f"t-{new_secret()[:12]}"
        self.config, self._folder = config, folder
        self._address = Address(run_id, server.url, store, None, str(folder / "keys.json"))
        self.role = open_role(config, self._address)
        create_flow(self.role)
        self.role.checkpoints.store.put(ENVIRONMENT, json.dumps(describe_environment(config).as_dict()).encode())
        self._command = [run_id, "--redis", server.url, "--store", store, "--config", str(folder / "config.yaml")]
        self._environ = {**os.environ, "STAGECOACH_REDIS_PASSWORD": server.password}
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.worker: Worker | None = None

    def start(self, *ranks: int) -> None:
        """`python -m trainer_node` for each; rank 0 is the trainer."""
        for rank in ranks:
            command = [sys.executable, "-m", "trainer_node", *self._command, "--rank", str(rank)]
            with (self._folder / f"rank-{rank}.log").open("a") as log:
                self.processes[rank] = subprocess.Popen(command, stdout=log, stderr=log, env=self._environ)

    def play(self, until: Callable[[], bool]) -> None:
        """The worker acts meanwhile."""
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while not until():
            assert time.monotonic() < deadline, self.said()
            self._act()
            time.sleep(0.01)

    def _act(self) -> None:
        """The worker begins once there is something to act with."""
        state = self.role.flow.read()
        if state.version < 0 or state.state != "running":
            return
        if self.worker is None:
            self.worker = Worker(open_role(self.config, self._address), 0)
            self.worker.start()
        self.worker.step(0)

    def play_to(self, version: int) -> None:
        self.play(lambda: self.role.flow.read().version >= version)

    def finish(self) -> str:
        """To the end of all processes; answers the SHA-256 of the final policy."""
        self.play(lambda: all(process.poll() is not None for process in self.processes.values()))
        assert [process.returncode for process in self.processes.values()] == [0] * len(self.processes), self.said()
        finished = self.role.checkpoints.marker(FINISHED)
        assert finished is not None
        assert finished["reason"] == "exhausted"
        assert all(line.balances for line in read_books(self.role.redis, self.role.run_id).values())
        return hashlib.sha256(self.role.checkpoints.load(finished["final"]).objects[POLICY]).hexdigest()

    def events(self) -> str:
        return "\n".join(event.text for event in read_events(self.role.redis, self.role.run_id))

    def beats(self) -> dict[str, Beat]:
        return {beat.id: beat for beat in read_heartbeats(self.role.redis, self.role.run_id)}

    def waits(self, role: str) -> tuple[str | None, str]:
        """What it waits for, and what it says of that."""
        beat = self.beats().get(role)
        return (beat.waiting_for, beat.trouble or "") if beat else (None, "")

    def said(self) -> str:
        return f"{self.events()}\n" + "\n".join(path.read_text()[-2000:] for path in self._folder.glob("*.log"))

    def close(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        if self.worker is not None:
            self.worker.stop("end of test")
        self.role.redis.close()


NewCrew = Callable[[Config], Crew]


@pytest.fixture
def new_crew(redis_server: RedisServer, tmp_path: Path) -> Iterator[NewCrew]:
    crews: list[Crew] = []

    def make(config: Config) -> Crew:
        crews.append(Crew(redis_server, tmp_path / f"crew-{len(crews)}", config))
        return crews[-1]

    yield make
    for crew in crews:
        crew.close()


def ranked(ranks: int, **sections: Any) -> Config:
    trainer = {"ranks": ranks, "rank_timeout_seconds": 15}
    return small(**({"trainer": trainer, "archive": "all", "stop_at": {"updates": 8}} | sections))


@pytest.mark.processes
def test_whoever_dies_hangs_or_leaves_the_weights_are_those_of_a_run_that_nothing_happened_to(
    new_crew: NewCrew,
) -> None:
    config = ranked(3)
    calm = new_crew(config)
    calm.start(0, 1, 2)
    expected = calm.finish()
    assert "3 ranks learn together over gloo, in the group of epoch 1" in calm.events()

    crew = new_crew(config)
    crew.start(0)
    crew.play(lambda: "rank-1 (has not started), rank-2 (has not started)" in crew.waits("trainer")[1])
    assert crew.waits("trainer")[0] == "the other ranks"
    assert bottleneck(list(crew.beats().values()), {}).startswith(
        "rank-1 (has not started), rank-2 (has not started) ("
    )
    crew.start(1, 2)
    for version, victim in ((2, 1), (3, 0)):
        crew.play_to(version)
        crew.processes[victim].kill()
        crew.processes[victim].wait()
        crew.start(victim)
    crew.play_to(5)
    stopped = crew.processes[2]
    stopped.send_signal(signal.SIGSTOP)
    crew.play(lambda: "rank-2 (on " in crew.waits("trainer")[1] and "silent for" in crew.waits("trainer")[1])
    stopped.send_signal(signal.SIGCONT)  # it finds its group gone, and joins the new one
    crew.play_to(6)
    crew.processes[1].terminate()
    assert crew.processes[1].wait(60) == 0
    crew.start(1)
    assert crew.finish() == expected
    assert "with its broken group of ranks (gloo: " in crew.events()
    assert crew.beats()["rank-2"].ended == "finished"

    final = crew.role.checkpoints.marker(FINISHED)
    assert final is not None
    found = replay(crew.role.checkpoints, config, crew.role.description(), "start", final["final"])
    assert found.equal, found


def test_a_rank_goes_with_the_run_and_is_told_what_is_wrong_with_its_number(new_crew: NewCrew) -> None:
    crew = new_crew(ranked(2))
    crew.start(2)
    assert crew.processes.pop(2).wait(60) == 2
    assert "--rank 2: this run has trainer.ranks=2, which are 0 to 1" in crew.said()
    crew.start(1)
    crew.play(lambda: crew.waits("rank-1")[0] == "the trainer's group")
    crew.role.flow.set_state("finished", "stopped")
    assert crew.processes[1].wait(60) == 0
    assert crew.beats()["rank-1"].ended == "finished"


def test_a_run_that_is_to_end_does_not_wait_for_ranks_that_have_nothing_to_learn(new_crew: NewCrew) -> None:
    crew = new_crew(ranked(2))
    crew.start(0)
    crew.play(lambda: crew.waits("trainer")[0] == "the other ranks")
    crew.role.flow.set_state("stopping", "stopped", expected="running")
    assert crew.processes[0].wait(90) == 0
    finished = crew.role.checkpoints.marker(FINISHED)
    assert finished is not None and (finished["reason"], finished["version"]) == ("stopped", 0)


def test_only_the_newest_trainer_calls_the_ranks(new_crew: NewCrew) -> None:
    crew = new_crew(ranked(2))
    trainer, rank = Rendezvous(crew.role), Rendezvous(crew.role)
    older, newer = crew.role.flow.take_over(), crew.role.flow.take_over()
    trainer.call(newer, Invitation("127.0.0.1", 1, 2))
    with pytest.raises(Fenced, match=f"epoch {older}"):
        trainer.call(older, Invitation("127.0.0.1", 2, 2))
    with pytest.raises(Fenced):
        trainer.call(older)
    trainer.call(newer)
    first, second = rank.next(0), rank.next(0)
    assert first is not None and first.invitation == Invitation("127.0.0.1", 1, 2)
    assert second is not None and (second.epoch, second.invitation) == (newer, None)
    assert rank.next(0) is None
    crew.role.redis.delete(rank._keys.ranks)  # a Redis that was set back, on a machine whose clock is behind
    crew.role.redis.xadd(rank._keys.ranks, {"epoch": newer + 1, "invitation": ""}, id="1-0")
    found = [rank.next(0), rank.next(0)]
    assert found[0] is None
    assert found[1] is not None and found[1].epoch == newer + 1
    assert trainer.own_address() == "127.0.0.1"


def test_who_waits_too_long_for_ranks_says_for_whom(new_crew: NewCrew) -> None:
    crew = new_crew(ranked(2, rollout={"fragment_steps": 8, "fragments_per_update": 2, "wait_deadline_seconds": 3}))
    crew.start(0)
    assert crew.processes[0].wait(90) == 1
    finished = crew.role.checkpoints.marker(FINISHED)
    assert finished is not None
    assert "s for the other ranks; the deadline is 3 s: rank-1 (has not started)" in finished["reason"]
