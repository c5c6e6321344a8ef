"""A run's folder: made once, held by one, found again, and its secrets for its owner's eyes only."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagecoach.coordinator.catalog.run_files import run_paths
from stagecoach.coordinator.catalog.run_folder import RunFolder
from stagecoach.coordinator.cli.runs import _delete
from stagecoach.coordinator.services.embedded import BUCKET
from stagecoach.shared.base.address import Address
from stagecoach.shared.base.errors import RunExists, RunNotFound, UserError
from stagecoach.shared.config.loading import load_config
from stagecoach.shared.config.run_config import Config
from tests.conftest import minimal_config
from tests.support.processes.command_line import Stagecoach, check_refused, contents

ADDRESS = Address("a", "redis://127.0.0.1:7/0", "s3://bucket", "http://127.0.0.1:8", "/where/credentials.json")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def config(runs: Path) -> Config:
    return minimal_config(runs_dir=str(runs))


@pytest.fixture
def folder(config: Config) -> Iterator[RunFolder]:
    """A new one, of the run `a`, which is held."""
    made = RunFolder.create(config, "a")
    yield made
    made.unlock()


def test_create_writes_config_and_locks(config: Config, folder: RunFolder, runs: Path) -> None:
    assert (folder.path, folder.config(), folder.live) == (runs / "a", config, True)
    again = RunFolder.find("a", runs)
    assert again.live
    with pytest.raises(
        UserError, match="run 'a' is live already; `stagecoach attach a` follows it, `stagecoach stop a` ends it"
    ):
        again.lock()
    folder.unlock()
    assert not again.live
    again.lock()
    assert (runs / "a" / "lock").read_text() == str(os.getpid())
    again.unlock()


def test_create_explains_existing_or_unwritable_folder(config: Config, folder: RunFolder, runs: Path) -> None:
    folder.unlock()
    before = contents(runs)
    other = Config.model_validate({**config.model_dump(), "seed": 99})
    with pytest.raises(
        RunExists, match=r"run 'a' exists in /.*runs .runs_dir.; choose another --run-id, or .*stagecoach resume a"
    ):
        RunFolder.create(other, "a")
    assert contents(runs) == before
    with pytest.raises(UserError, match=r"cannot create the run's folder .*check runs_dir"):
        RunFolder.create(minimal_config(runs_dir=str(runs / "a" / "lock" / "runs")), "a")


KILLED_AT_EACH_STEP = """
import os, signal, sys
from pathlib import Path
from stagecoach.coordinator.catalog.run_folder import RunFolder
from stagecoach.shared.config.loading import load_config

def create(runs, last):
    config, steps = load_config("cartpole", {"runs_dir": runs, "seed": last + 1}, {}), [0]
    def count(event, arguments):
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.truncate", "fcntl.flock"):
            steps[0] += 1
            if steps[0] > last:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)
    RunFolder.create(config, "a")
    os._exit(0)

for last in range(100):
    runs = f"{sys.argv[1]}/{last}"
    if not (child := os.fork()):
        create(runs, last)
    if os.waitpid(child, 0)[1] == 0:
        break
print(last)
"""


def test_folder_killed_at_each_step_can_be_created_again(tmp_path: Path) -> None:
    script = [sys.executable, "-c", KILLED_AT_EACH_STEP, str(tmp_path)]
    steps = int(subprocess.run(script, capture_output=True, text=True, check=True).stdout)
    assert 8 < steps < 100
    left = 0
    for killed in range(steps + 1):
        runs = tmp_path / str(killed)
        config, before = load_config("cartpole", {"runs_dir": str(runs), "seed": 99}, {}), [*runs.glob("**/*")]
        if run_paths(runs):
            assert killed == steps
            assert RunFolder.find("a", runs).config().seed == killed + 1
            with pytest.raises(RunExists, match="run 'a' exists in"):
                RunFolder.create(config, "a")
            _delete("a", runs, ask=False)
        elif killed % 2:
            left += bool(before)
            folder = RunFolder.create(config, "a")
            assert (folder.config().seed, folder.live, [*runs.iterdir()]) == (99, True, [runs / "a"])
            folder.remove()
        elif RunFolder.incomplete("a", runs).path.exists():
            _delete("a", runs, ask=False)
        assert not runs.exists() or [*runs.iterdir()] == []
    assert left >= 3


def test_run_killed_before_it_is_prepared_is_resumed(config: Config, stagecoach: Stagecoach) -> None:
    RunFolder.create(config.replace("stop_at", {"updates": 1}), "a").unlock()
    check_refused(stagecoach("train", "config.yaml", "--run-id", "a"), "exists in", "continue it: stagecoach resume a")
    assert "1 update" in stagecoach("resume", "a", "--inline").ok()


def test_somebody_who_only_looks_does_not_hold_it(
    folder: RunFolder, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagecoach.coordinator.catalog.run_folder._LOCK_TRIES", 200)
    folder.unlock()
    looking = os.open(runs / "a" / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.1, os.close, [looking]).start()
    folder.lock()


def test_lock_ends_with_process(folder: RunFolder, runs: Path) -> None:
    folder.unlock()
    script = (
        "import sys, time; from pathlib import Path; from stagecoach.coordinator.catalog.run_folder import RunFolder\n"
        "RunFolder.find('a', Path(sys.argv[1])).lock(); print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(runs)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert folder.live
        holder.kill()
    assert not folder.live


def test_find_lists_existing_runs(config: Config, runs: Path) -> None:
    with pytest.raises(RunNotFound, match=r"no run 'a' in .*; runs there: 0"):
        RunFolder.find("a", runs)
    RunFolder.create(config, "b").unlock()
    (runs / "no-run").mkdir()
    (runs / "file").write_text("")
    with pytest.raises(RunNotFound, match=r"no run 'a' in .*; runs there: 1"):
        RunFolder.find("a", runs)
    with pytest.raises(UserError, match=r"run id '\.\./b'"):
        RunFolder.find("../b", runs)
    RunFolder.create(config, "cartpole-1").unlock()
    with pytest.raises(RunNotFound, match=r"did you mean cartpole-1\?"):
        RunFolder.find("cartpol-1", runs)
    assert [path.name for path in run_paths(runs)] == ["b", "cartpole-1"]
    assert run_paths(runs / "nowhere") == []


def test_secrets_are_made_once_and_are_the_owners(config: Config, folder: RunFolder, runs: Path) -> None:
    path, secrets = folder.credentials(config)
    assert set(secrets) == {"redis_password", "s3_access_key", "s3_secret_key"}
    assert len(set(secrets.values())) == 3
    assert path.stat().st_mode & 0o777 == 0o600
    assert RunFolder.find("a", runs).credentials(config) == (path, secrets)
    path.unlink()
    own = minimal_config(redis={"url": "redis://elsewhere:6379"})
    assert set(folder.credentials(own)[1]) == {"s3_access_key", "s3_secret_key"}, "of embedded services alone"


@pytest.mark.parametrize(
    "damage", [b"", b'{"redis_passw', b"\xff\xfe", b"[]", b'{"redis_password": "", "s3_access_key": null}']
)
def test_damaged_secrets_are_made_anew(config: Config, folder: RunFolder, damage: bytes) -> None:
    """As a full disk or a power cut left them; the services are told them as they start."""
    path, former = folder.credentials(config)
    path.write_bytes(damage)
    assert folder.credentials(config)[1].keys() == former.keys()
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.credentials(config)[1] == json.loads(path.read_text()) != former


def test_live_address_exists_while_run_is_live(folder: RunFolder, runs: Path) -> None:
    assert folder.live_address() is None, "its services are not up yet"
    folder.write_services(ADDRESS, ("/own/modules",))
    assert RunFolder.find("a", runs).live_address() == ADDRESS
    assert json.loads((runs / "a" / "services.json").read_text())["import_path"] == ["/own/modules"]
    folder.unlock()  # as when its coordinator was killed: the file is still there
    assert RunFolder.find("a", runs).live_address() is None
    folder.forget_services()
    assert not (runs / "a" / "services.json").exists()
    folder.forget_services()


def test_embedded_store_is_read_offline_as_folder(config: Config, folder: RunFolder, runs: Path) -> None:
    assert folder.offline_address(config).store_url == f"file://{runs / 'a' / 's3' / BUCKET}"
    own = minimal_config(store={"url": "s3://bucket/team", "endpoint_url": "http://minio:9000"})
    assert folder.offline_address(own) == Address("a", "embedded", "s3://bucket/team", "http://minio:9000")
