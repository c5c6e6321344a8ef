"""Ranks as processes of their own that find each other over Redis, and lose each other: the weights are the same."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stagecoach.coordinator.catalog.status import bottleneck
from stagecoach.rollout_worker.worker import Worker
from stagecoach.shared.base.errors import Fenced
from stagecoach.shared.config.loading import dump_config
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.protocol.events import read_events
from stagecoach.shared.protocol.flow_control import RunState
from stagecoach.shared.protocol.heartbeat import Beat, read_heartbeats
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.ledger import read_accounting
from stagecoach.shared.runtime.run_context import open_run_context
from stagecoach.shared.storage.checkpoint_store import FINISHED
from stagecoach.trainer_node.distributed.leader import Rendezvous
from stagecoach.trainer_node.distributed.process_group import Invitation
from stagecoach.trainer_node.replay.comparison import replay
from tests.conftest import RedisServer
from tests.support.learning.cases import DRAWING
from tests.support.runs.builders import folder_address, make_run
from tests.support.runs.game import POLICY, small
from tests.support.suite.speed import stretched

pytestmark = pytest.mark.timeout(600)
_DEADLINE_SECONDS = stretched(150.0)


class Crew:
    """One run: a trainer and its ranks in processes of their own, and a worker that is stepped here."""

    def __init__(self, server: RedisServer, folder: Path, config: Config) -> None:
        self.config, self._folder, self._address = config, folder, folder_address(server, folder)
        self.role = make_run(config, self._address)
        (folder / "config.yaml").write_text(dump_config(config))
        address = ["--redis", server.url, "--store", self._address.store_url]
        self._command = [self.role.run_id, *address, "--config", str(folder / "config.yaml")]
        self._environ = {**os.environ, "STAGECOACH_REDIS_PASSWORD": server.password}
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.worker: Worker | None = None

    def start(self, *ranks: int) -> None:
        for rank in ranks:
            command = [sys.executable, "-m", "stagecoach.trainer_node", *self._command, "--rank", str(rank)]
            with (self._folder / f"rank-{rank}.log").open("a") as log:
                self.processes[rank] = subprocess.Popen(command, stdout=log, stderr=log, env=self._environ)

    def play(self, until: Callable[[], bool]) -> None:
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
            self.worker = Worker(open_run_context(self.config, self._address), 0)
            self.worker.start()
        self.worker.step(0)

    def play_to(self, version: int) -> None:
        self.play(lambda: self.role.flow.read().version >= version)

    def replace(self, rank: int, version: int) -> None:
        """Once that version is there, the rank is killed and another one started."""
        self.play_to(version)
        self.processes[rank].kill()
        self.processes[rank].wait()
        self.start(rank)

    def finish(self) -> str:
        """To the end of all processes; answers the SHA-256 of the final policy."""
        self.play(lambda: all(process.poll() is not None for process in self.processes.values()))
        assert [process.returncode for process in self.processes.values()] == [0] * len(self.processes), self.said()
        finished = self.finished()
        assert finished["reason"] == "exhausted"
        assert all(line.balances for line in read_accounting(self.role.redis, self.role.run_id).values())
        return hashlib.sha256(self.role.checkpoints.load(finished["final"]).objects[POLICY]).hexdigest()

    def finished(self) -> dict[str, Any]:
        content = self.role.checkpoints.marker(FINISHED)
        assert content is not None
        return content

    def events(self) -> str:
        return "\n".join(event.text for event in read_events(self.role.redis, self.role.run_id))

    def beats(self) -> dict[str, Beat]:
        return {beat.id: beat for beat in read_heartbeats(self.role.redis, self.role.run_id)}

    def waits(self, role: str) -> tuple[str | None, str]:
        beat = self.beats().get(role)
        return (beat.waiting_for, beat.last_error or "") if beat else (None, "")

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
def test_rank_failures_leave_weights_equal(new_crew: NewCrew) -> None:
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
        crew.replace(victim, version)
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

    found = replay(crew.role.checkpoints, config, crew.role.description(), "start", crew.finished()["final"])
    assert found.equal, found


@pytest.mark.processes
def test_returning_ranks_get_replay_buffer_contents(new_crew: NewCrew) -> None:
    config = ranked(2, algorithm={"name": "dqn", **DRAWING}, checkpoint={"every": "2 updates", "keep_last": 9})
    calm, crew = new_crew(config), new_crew(config)
    calm.start(0, 1)
    expected = calm.finish()
    crew.start(0, 1)
    for version, victim in ((3, 1), (5, 0)):
        crew.replace(victim, version)
    assert crew.finish() == expected
    checkpoints = crew.role.checkpoints
    found = replay(checkpoints, config, crew.role.description(), checkpoints.names()[1], crew.finished()["final"])
    assert found.equal and found.versions > 4, found


def test_rank_ends_with_run_and_rejects_wrong_number(new_crew: NewCrew) -> None:
    crew = new_crew(ranked(2))
    crew.start(2)
    assert crew.processes.pop(2).wait(60) == 2
    assert "--rank 2: this run has trainer.ranks=2, which are 0 to 1" in crew.said()
    crew.start(1)
    crew.play(lambda: crew.waits("rank-1")[0] == "the trainer's group")
    crew.role.flow.set_state(RunState.FINISHED, "stopped")
    assert crew.processes[1].wait(60) == 0
    assert crew.beats()["rank-1"].ended == "finished"


def test_stopped_run_does_not_wait_for_ranks(new_crew: NewCrew) -> None:
    crew = new_crew(ranked(2))
    crew.start(0)
    crew.play(lambda: crew.waits("trainer")[0] == "the other ranks")
    crew.role.flow.set_state(RunState.STOPPING, "stopped", expected=RunState.RUNNING)
    assert crew.processes[0].wait(90) == 0
    assert (crew.finished()["reason"], crew.finished()["version"]) == ("stopped", 0)


def test_only_the_newest_trainer_calls_the_ranks(new_crew: NewCrew) -> None:
    crew = new_crew(ranked(2))
    trainer, rank = Rendezvous(crew.role.redis, crew.role.run_id), Rendezvous(crew.role.redis, crew.role.run_id)
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
    # a Redis that was rolled back, on a machine whose clock is behind
    crew.role.redis.delete(RunKeys(crew.role.run_id).ranks)
    crew.role.redis.xadd(RunKeys(crew.role.run_id).ranks, {"epoch": newer + 1, "invitation": ""}, id="1-0")
    found = [rank.next(0), rank.next(0)]
    assert found[0] is None
    assert found[1] is not None and found[1].epoch == newer + 1


def test_wait_for_ranks_names_missing_rank_at_deadline(new_crew: NewCrew) -> None:
    crew = new_crew(ranked(2, rollout={"fragment_steps": 8, "fragments_per_update": 2, "wait_deadline_seconds": 3}))
    crew.start(0)
    assert crew.processes[0].wait(90) == 1
    assert "s for the other ranks; the deadline is 3 s: rank-1 (has not started)" in crew.finished()["reason"]
