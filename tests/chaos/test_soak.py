"""The soak's verdict: each thing that it must not let pass makes it fail."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from stagecoach.shared.protocol.keys import RunKeys
from tests.chaos import soak
from tests.chaos.soak import NotThrough, Soak, verdict
from tests.conftest import MakeRole
from tests.support.processes.command_line import CommandLine
from tests.support.processes.process_faults import Fault, Watched
from tests.support.runs.small_run import SmallWorker, begin, small_config

EQUAL = {"equal": True}


class Beside(Watched):
    def __init__(self, client: redis.Redis, terminal: CommandLine, run_id: str) -> None:
        super().__init__(terminal, run_id)
        self._beside = client

    def client(self) -> redis.Redis:
        return self._beside


@pytest.fixture
def work(make_role: MakeRole, tmp_path: Path) -> Iterator[Soak]:
    role = make_role(small_config())
    begin(role)
    SmallWorker(role).work()
    terminal = CommandLine(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], text=True)
    work = Soak(terminal, 0.0, 1.0, random.Random(1), Beside(role.redis, terminal, role.run_id))
    work.process = process
    yield work
    process.kill()
    process.wait()
    terminal.close()
    role.redis.close()


def fault(version: int) -> Fault:
    return Fault("trainer", "killed", "trainer", 1, time.monotonic(), version, -1)


def test_soak_passes_when_the_run_recovers(work: Soak) -> None:
    work.faults.append(fault(version=-1))
    work.watch_recovery()  # it asks for the version, and waits for a later one
    assert work.unrecovered() and not verdict(work, EQUAL, "")
    work.watched.client().hset(RunKeys(work.watched.run_id).flow, "version", "1")
    work.watch_recovery()
    work.look()
    assert (work.unrecovered(), work.looks) == ([], 1)
    assert verdict(work, EQUAL, "")
    assert not verdict(work, {"equal": False}, "")
    assert not verdict(work, EQUAL, "the run ended with code 1")


def test_soak_fails_when_accounting_is_off_by_one(work: Soak) -> None:
    work.watched.client().hincrby(RunKeys(work.watched.run_id).produced, "worker-0:transitions", 1)
    work.look()
    assert {line.partition(":")[0] for line in work.imbalances} == {"worker-0", "total"}
    assert not verdict(work, EQUAL, "")


def test_soak_fails_when_recovery_takes_too_long(work: Soak, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "RECOVERY_SECONDS", 0.0)
    work.faults.append(fault(version=0))
    with pytest.raises(NotThrough, match="trainer killed"):
        work.watch_recovery()


def test_soak_fails_when_the_run_ends_on_its_own(work: Soak) -> None:
    work.process = work.terminal.start("status", "nobody")
    work.process.wait()
    with pytest.raises(NotThrough, match="ended with code 2"):
        work.resume_if_killed()


def test_goodput_is_the_share_of_the_calm_rate(work: Soak, capsys: pytest.CaptureFixture[str]) -> None:
    work.faulty_minutes, work.calm_minutes = 10.0, 5.0
    assert [work.faulty(60 * minute) for minute in (0, 9.9, 10.1, 14.9, 15.1)] == [True, True, False, False, True]
    work.faults.append(fault(version=0))
    for faulty in (True, False):
        work.note_window(faulty)
    assert len(work.windows) == 1, "what is not over yet belongs to the faults"
    work.faults[0].recovered = 1.0
    for faulty in (False, False, True):
        work.note_window(faulty)
    assert [version for _, version in work.windows] == [0, 0, 0]
    soak.report_goodput([(0.0, 0), (10.0, 90), (20.0, 190), (30.0, 260)])
    assert "goodput: 0.800" in capsys.readouterr().out
