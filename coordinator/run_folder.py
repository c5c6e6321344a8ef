"""A run's folder on this machine: what is in it, who holds it, and how a run is found again.

```
runs/<run_id>/
  config.yaml         the resolved config
  import_path.json    folders of the user's own modules
  services.json       addresses, while the run is live here
  credentials.json    of embedded services; only its owner may read it
  lock                held (flock) by the coordinator that runs it: the kernel lets go when that dies
  outage.json         there while the coordinator waits for Redis (coordinator/redis_outage.py)
  elsewhere.json      instead of the above, for a run that lives on other machines (coordinator/elsewhere.py)
  redis/  s3/         data of embedded services
  logs/               one file per role and service
  signals/            train.csv, tensorboard/
```
"""

from __future__ import annotations

import difflib
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.elsewhere import Elsewhere, read_elsewhere
from coordinator.run_list import LOCK, former_name, is_locked, run_paths
from coordinator.services import BUCKET, new_secret
from shared.config import Config
from shared.config_sources import dump_config, load_config
from shared.connection import Address
from shared.errors import RunExists, RunLive, RunNotFound, UserError
from shared.launch import LOGS, RESOLVED_CONFIG, SERVICES, read_launch
from shared.redis_keys import check_run_id

CREDENTIALS, IMPORT_PATH = "credentials.json", "import_path.json"
_LOCK_TRIES = 10
_SECRET = re.compile(r"[0-9a-f]{32}")
_LOGGER = logging.getLogger("stagecoach.coordinator")


@dataclass
class RunFolder:
    """One run's folder; `path` is absolute."""

    run_id: str
    path: Path
    _lock: int | None = None

    @classmethod
    def create(cls, config: Config, run_id: str, import_path: tuple[str, ...] = ()) -> RunFolder:
        """A new folder with the resolved config, locked; raises `RunExists` (nothing is overwritten)."""
        path = config.runs_dir.expanduser().resolve() / check_run_id(run_id)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        except FileExistsError:
            raise RunExists(
                f"run {run_id!r} exists in {path.parent}; choose another --run-id, or continue it: "
                f"stagecoach resume {run_id}"
            ) from None
        except OSError as error:
            raise UserError(
                f"cannot make the run's folder {path}: {error}; check runs_dir and its permissions"
            ) from None
        folder = cls(run_id, path)
        try:
            (path / LOGS).mkdir()
            folder.write_config(config)
            (path / IMPORT_PATH).write_text(json.dumps(import_path))
            folder.lock()
        except OSError as error:
            folder.remove()
            raise UserError(f"cannot write the run's folder {path}: {error}; is the disk full?") from None
        return folder

    @classmethod
    def find(cls, run_id: str, runs_dir: Path) -> RunFolder:
        """The folder of an existing run; raises `RunNotFound` with the runs that there are."""
        path = runs_dir.expanduser().resolve() / check_run_id(run_id)
        if not (path / RESOLVED_CONFIG).is_file():
            known = [path.name for path in run_paths(runs_dir)]
            nearest = ", ".join(difflib.get_close_matches(run_id, known, cutoff=0.5))
            hint = f"did you mean {nearest}?" if nearest else f"runs there: {len(known)};"
            raise RunNotFound(
                f"no run {run_id!r} in {runs_dir}; {hint} `stagecoach runs` lists them; for one that lives elsewhere "
                f"give its folder in the store: s3://bucket/prefix/{run_id}"
            )
        if former := former_name(path):
            raise RunNotFound(
                f"the folder {path} holds the run {former!r}, and was copied or renamed: a run keeps its id, which "
                f"names what is in its store. Give the folder that name (in another folder of runs, which "
                f"--runs-dir names, if {former!r} is still there), or delete it"
            )
        return cls(run_id, path)

    @classmethod
    def of(cls, config: Config, run_id: str) -> RunFolder | None:
        """The folder of a run that was made on this machine; None where there is none."""
        path = config.runs_dir.expanduser().resolve() / check_run_id(run_id)
        return cls(run_id, path) if (path / RESOLVED_CONFIG).is_file() and read_elsewhere(path) is None else None

    def config(self, overrides: tuple[str, ...] = ()) -> Config:
        """The run's own resolved config, changed only by `overrides`; the environment does not change it."""
        return load_config(self.path / RESOLVED_CONFIG, overrides, environ={})

    def write_config(self, config: Config) -> None:
        """The resolved config, whole or not at all."""
        temporary = self.path / f"{RESOLVED_CONFIG}.partial"
        temporary.write_text(dump_config(config))
        temporary.replace(self.path / RESOLVED_CONFIG)

    def import_path(self) -> tuple[str, ...]:
        """Folders of the user's own modules, as they were when the run was made."""
        try:
            return tuple(json.loads((self.path / IMPORT_PATH).read_text()))
        except FileNotFoundError:
            return ()

    @property
    def elsewhere(self) -> Elsewhere | None:
        """Where the run lives, if not on this machine."""
        return read_elsewhere(self.path)

    @property
    def made_here(self) -> bool:
        """Whether the run's config was made on this machine, and not taken from a store."""
        elsewhere = self.elsewhere
        return elsewhere is None or elsewhere.submission is not None

    def lock(self) -> None:
        """Holds the run for this process; raises `RunLive` while another coordinator does."""
        handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not _locked(handle):
            os.close(handle)
            raise RunLive(f"run {self.run_id!r} is live already; see `stagecoach status {self.run_id}`")
        os.truncate(handle, 0)
        os.write(handle, str(os.getpid()).encode())
        self._lock = handle

    def unlock(self) -> None:
        """Lets go."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def held(self) -> bool:
        """Whether this process holds the run."""
        return self._lock is not None

    @property
    def live(self) -> bool:
        """Whether a coordinator holds the run right now (this process counts)."""
        if self.held:
            return True
        return is_locked(self.path)

    def credentials(self, config: Config) -> tuple[Path, dict[str, str]]:
        """The secrets of the run's embedded services (of no others), made once; anew where the file is damaged.

        The services take what they are given as they start, and keep no secret in their data.
        """
        path = self.path / CREDENTIALS
        names = ["redis_password"] if config.redis.url == "embedded" else []
        names += ["s3_access_key", "s3_secret_key"] if config.store.url == "embedded" else []
        try:
            found = json.loads(path.read_text())
            if isinstance(found, dict) and all(_SECRET.fullmatch(str(found.get(name))) for name in names):
                return path, found
            _LOGGER.warning("%s is not what was written there; new secrets are made", path)
        except FileNotFoundError:
            pass
        except ValueError as error:
            _LOGGER.warning("%s is damaged (%s); new secrets are made", path, error)
        made = {name: new_secret() for name in names}
        temporary = path.with_suffix(".partial")
        temporary.unlink(missing_ok=True)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(made, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        return path, made

    def write_services(self, address: Address, import_path: tuple[str, ...]) -> None:
        """Where the run's services are, for everybody on this machine; there while the run is live."""
        content: dict[str, Any] = {"address": address.as_dict(), "import_path": list(import_path)}
        temporary = self.path / f"{SERVICES}.partial"
        temporary.write_text(json.dumps(content, indent=1))
        temporary.replace(self.path / SERVICES)

    def forget_services(self) -> None:
        """The services are about to go."""
        (self.path / SERVICES).unlink(missing_ok=True)

    def live_address(self) -> Address | None:
        """The address of the live run; None where no coordinator holds it (or its services aren't up yet)."""
        if not self.live or not (self.path / SERVICES).exists():
            return None
        return read_launch(self.path, self.run_id).address

    def offline_address(self, config: Config) -> Address:
        """How to reach what no coordinator of this machine keeps up; an embedded store's bucket is a plain folder."""
        if config.store.url == "embedded":
            return Address(self.run_id, "", f"file://{self.path / 's3' / BUCKET}")
        redis_url, endpoint_url, elsewhere = config.redis.url, config.store.endpoint_url, self.elsewhere
        if elsewhere is not None:
            redis_url, endpoint_url = elsewhere.redis_url or redis_url, elsewhere.endpoint_url or endpoint_url
        return Address(self.run_id, redis_url, config.store.url, endpoint_url)

    def remove(self) -> None:
        """Takes back a folder whose run never started."""
        self.unlock()
        shutil.rmtree(self.path, ignore_errors=True)


def _locked(handle: int) -> bool:
    """Tries for a moment: whoever just looks whether the run is live (`live`) holds the file for an instant, too."""
    for attempt in range(_LOCK_TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.05 if attempt < _LOCK_TRIES - 1 else 0.0)
    return False


def new_run_id(config: Config) -> str:
    """Environment, time, and four random digits: `cartpole-v1-20260102-150405-9f3a`."""
    name = "".join(letter if letter.isalnum() else "-" for letter in config.environment.id.rpartition(":")[2]).lower()
    return f"{name[:30].strip('-') or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
