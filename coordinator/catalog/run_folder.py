"""A run's folder on this machine (docs/reference/commands.md): its contents, lock, and lookup.

For a run on other machines the folder is a link, on which every command works; Redis and the store have its state.
"""

import contextlib
import difflib
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, Field, TypeAdapter

from stagecoach.coordinator.catalog.run_files import LOCK, REMOTE, former_name, is_locked, run_paths
from stagecoach.coordinator.services.embedded import BUCKET, new_secret
from stagecoach.shared.base import world
from stagecoach.shared.base.address import Address
from stagecoach.shared.base.errors import ConfigError, ObjectMissing, RunExists, RunLive, RunNotFound, UserError
from stagecoach.shared.base.local_disk import TEMPORARY, replacing
from stagecoach.shared.base.user_code import IMPORT_PATH
from stagecoach.shared.config.loading import dump_config, load_config, parse_config, parse_yaml
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.protocol.keys import check_run_id
from stagecoach.shared.runtime.launch import LOGS, RESOLVED_CONFIG, SERVICES, read_services
from stagecoach.shared.storage.checkpoint_store import CONFIG, CheckpointStore
from stagecoach.shared.storage.object_store import open_folder, open_store


class Submission(BaseModel, frozen=True):
    """Job sent to a cluster, complete enough to send again."""

    cluster: str
    """Ray's job server, or the cluster file that leads there."""
    working_dir: str
    command: tuple[str, ...]
    """Arguments of `stagecoach` on the cluster."""


class RemoteLink(BaseModel, frozen=True):
    redis_url: str | None = None
    """Redis URL from this machine (through a tunnel), if it differs from the run's."""
    endpoint_url: str | None = None
    """S3 endpoint from this machine, if it differs."""
    store_url: str | None = None
    """Location of a copy of the run's embedded store."""
    submission: Submission | None = None
    job: str | None = None

    def write(self, folder: Path) -> None:
        with replacing(folder / REMOTE) as file:
            file.write(self.model_dump_json(indent=1).encode())


def read_remote(folder: Path) -> RemoteLink | None:
    path = folder / REMOTE
    return RemoteLink.model_validate_json(path.read_text()) if path.exists() else None


def link(location: str, runs_dir: Path, endpoint_url: str | None = None, redis_url: str | None = None) -> str:
    """Links the run at `location` (its folder in a store) in `runs_dir`; returns its id.

    `endpoint_url` defaults to STAGECOACH__STORE__ENDPOINT_URL. Raises `RunNotFound`, or the store's errors.
    """
    endpoint_url = endpoint_url or os.environ.get("STAGECOACH__STORE__ENDPOINT_URL")
    store, run_id = open_folder(location, endpoint_url)
    check_run_id(run_id)
    store.check()
    try:
        text = store.get(CONFIG).decode(errors="replace")
    except ObjectMissing:
        raise RunNotFound(f"no run at {location}: {CONFIG} is missing there") from None
    try:
        config = parse_config(parse_yaml(text, f"{location}/{CONFIG}"))
    except ConfigError as error:
        raise ConfigError(f"{run_id} comes from another version of Stagecoach: {error}") from None
    config = config.model_copy(update={"runs_dir": runs_dir})
    path = runs_dir.expanduser().resolve() / run_id
    known = read_remote(path) if (path / RESOLVED_CONFIG).exists() else RemoteLink()
    if known is None:
        raise UserError(f"{path} is already a run of this machine; name it by its id: {run_id}")
    path.mkdir(parents=True, exist_ok=True)
    here = {"redis_url": redis_url or known.redis_url, "endpoint_url": endpoint_url or known.endpoint_url}
    if config.store.url == "embedded":
        base = location.rstrip("/").removesuffix(run_id).rstrip("/")
        folder = f"file://{Path(base.removeprefix('file://')).resolve()}"
        here["store_url"] = base if base.startswith("s3://") else folder
    known.model_copy(update=here).write(path)
    (path / RESOLVED_CONFIG).write_text(dump_config(config))
    return run_id


CREDENTIALS, _BEGUN = "credentials.json", "begun"
_LOCK_TRIES = 10
_SECRETS = TypeAdapter(dict[str, Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]])
_LOGGER = logging.getLogger("stagecoach.coordinator")


@dataclass
class RunFolder:
    """One run's folder; `path` is absolute."""

    run_id: str
    path: Path
    _lock: int | None = None

    @classmethod
    def create(
        cls, config: Config, run_id: str, import_path: tuple[str, ...] = (), store: Path | None = None
    ) -> Self:  # fmt: skip
        """Creates a locked folder with the resolved config; raises `RunExists`.

        It gets its name once it is complete. What a start that was killed before has left is overwritten. `store` is
        moved into it: the folder of an embedded store that has been filled already.
        """
        path = config.runs_dir.expanduser().resolve() / check_run_id(run_id)
        folder = cls.incomplete(run_id, path.parent)
        try:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise FileExistsError
            folder.path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise RunExists(cls(run_id, path)._why_it_exists()) from None
        except OSError as error:
            remedy = "check runs_dir and its permissions"
            raise UserError(f"cannot create the run's folder {path}: {error}; {remedy}") from None
        folder.lock()
        try:
            for partial in folder.path.glob(f"{TEMPORARY}*"):
                partial.unlink()
            (folder.path / LOGS).mkdir(exist_ok=True)
            shutil.rmtree(folder.path / "s3", ignore_errors=True)
            if store is not None:
                store.rename(folder.path / "s3")
            folder.write_config(config)
            (folder.path / IMPORT_PATH).write_text(json.dumps(import_path))
            folder.path.rename(path)
        except OSError as error:
            folder.remove()
            raise UserError(f"cannot write the run's folder {path}: {error}; is the disk full?") from None
        folder.path = path
        return folder

    @classmethod
    def incomplete(cls, run_id: str, runs_dir: Path) -> Self:
        """The folder of a run that is being created, or whose start was killed before it was complete."""
        return cls(run_id, runs_dir.expanduser().resolve() / f".{check_run_id(run_id)}.incomplete")

    def _why_it_exists(self) -> str:
        if (self.path / RESOLVED_CONFIG).is_file():
            again = f"choose another --run-id, or continue it: {self.continued_by}"
            return f"run {self.run_id!r} exists in {self.path.parent} (runs_dir); {again}"
        other = f"{self.path} exists and is not a run: {RESOLVED_CONFIG} is missing"
        return f"{other}; choose another --run-id, or delete it"

    @classmethod
    def find(cls, run_id: str, runs_dir: Path) -> Self:
        """Folder of an existing run; raises `RunNotFound` with similar ids."""
        path = runs_dir.expanduser().resolve() / check_run_id(run_id)
        if not (path / RESOLVED_CONFIG).is_file():
            known = [path.name for path in run_paths(runs_dir)]
            nearest = ", ".join(difflib.get_close_matches(run_id, known, cutoff=0.5))
            hint = f"did you mean {nearest}?" if nearest else f"runs there: {len(known)};"
            raise RunNotFound(
                f"no run {run_id!r} in {path.parent} (runs_dir); {hint} `stagecoach runs` lists them; for one on other "
                f"machines give its folder in the store: s3://bucket/prefix/{run_id}"
            )
        if former := former_name(path):
            raise RunNotFound(
                f"the folder {path} contains the run {former!r}, so it was copied or renamed; its store is keyed by "
                f"that id. Rename the folder back to {former!r} (in another folder, given by --runs-dir, if that "
                f"name is taken), or delete it"
            )
        return cls(run_id, path)

    @classmethod
    def of(cls, config: Config, run_id: str) -> Self | None:
        """Folder of a run created on this machine, or None."""
        found = cls.known(config, run_id)
        return found if found is not None and found.remote is None else None

    @classmethod
    def known(cls, config: Config, run_id: str) -> Self | None:
        """Folder of a run of this machine or, as a link, of others; or None."""
        path = config.runs_dir.expanduser().resolve() / check_run_id(run_id)
        return cls(run_id, path) if (path / RESOLVED_CONFIG).is_file() else None

    def config(self, overrides: tuple[str, ...] = ()) -> Config:
        """Resolved config of the run with `overrides`; environment variables are ignored."""
        return load_config(self.path / RESOLVED_CONFIG, overrides, environ={})

    def write_config(self, config: Config) -> None:
        with replacing(self.path / RESOLVED_CONFIG) as file:
            file.write(dump_config(config).encode())

    def import_path(self) -> tuple[str, ...]:
        """Folders of the user's modules, recorded when the run was created."""
        path = self.path / IMPORT_PATH
        return tuple(json.loads(path.read_text())) if path.exists() else ()

    @property
    def remote(self) -> RemoteLink | None:
        """Link to a run on other machines, or None."""
        return read_remote(self.path)

    @property
    def made_here(self) -> bool:
        """True if the run's config was created on this machine, not read from a store."""
        return (remote := self.remote) is None or remote.submission is not None

    @property
    def continued_by(self) -> str:
        """Command that continues an interrupted run."""
        here = f"stagecoach resume {self.run_id}"
        return here if self.made_here else f"stagecoach train CONFIG --address URL --run-id {self.run_id} --or-resume"

    def lock(self) -> None:
        """Locks the run for this process; raises `RunLive` while another coordinator holds it."""
        handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if not _locked(handle):
            os.close(handle)
            raise self.already_live()
        os.truncate(handle, 0)
        os.write(handle, str(os.getpid()).encode())
        self._lock = handle

    def already_live(self) -> RunLive:
        """Returns the error for a run that another coordinator holds."""
        name = self.run_id
        return RunLive(
            f"run {name!r} is live already; `stagecoach attach {name}` follows it, `stagecoach stop {name}` ends it"
        )

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        self.lock()
        try:
            yield
        finally:
            self.unlock()

    @property
    def held(self) -> bool:
        return self._lock is not None

    @property
    def live(self) -> bool:
        """True while a coordinator (this process included) holds the run."""
        return self.held or is_locked(self.path)

    def credentials(self, config: Config) -> tuple[Path, dict[str, str]]:
        """Secrets of the run's embedded services, created once, and again if the file is damaged.

        The services take secrets at their start and keep none in their data.
        """
        path = self.path / CREDENTIALS
        names = ["redis_password"] if config.redis.url == "embedded" else []
        names += ["s3_access_key", "s3_secret_key"] if config.store.url == "embedded" else []
        if path.exists():
            with contextlib.suppress(ValueError):
                found = _SECRETS.validate_json(path.read_bytes())
                if found.keys() >= set(names):
                    return path, found
            _LOGGER.warning("%s is damaged; creating new secrets", path)
        made = {name: new_secret() for name in names}
        with replacing(path, mode=0o600) as file:
            file.write(json.dumps(made).encode())
        return path, made

    def write_services(self, address: Address, import_path: tuple[str, ...]) -> None:
        """Publishes the services' addresses on this machine while the run is live."""
        content = {"address": asdict(address), "import_path": import_path}
        with replacing(self.path / SERVICES) as file:
            file.write(json.dumps(content, indent=1).encode())
        (self.path / _BEGUN).touch()

    @property
    def begun(self) -> bool:
        """True once a coordinator of this machine has prepared the run: missing data were then lost."""
        return (self.path / _BEGUN).exists()

    def forget_services(self) -> None:
        (self.path / SERVICES).unlink(missing_ok=True)

    def live_address(self) -> Address | None:
        """Address of the live run; None if no coordinator holds it, or its services are not up yet."""
        with contextlib.suppress(RunNotFound):
            return read_services(self.path, self.run_id)[0] if self.live else None
        return None

    def offline_address(self, config: Config) -> Address:
        """Address without a coordinator on this machine; an embedded store's bucket is a plain folder."""
        reached = self.remote or RemoteLink()
        if config.store.url == "embedded" and reached.store_url is None:
            return Address(self.run_id, "", f"file://{self.path / 's3' / BUCKET}")
        endpoint_url = reached.endpoint_url or config.store.endpoint_url
        return Address(
            self.run_id, reached.redis_url or config.redis.url, reached.store_url or config.store.url, endpoint_url
        )

    def checkpoint_store(self, config: Config, *, offline: bool = False) -> CheckpointStore:
        """Checkpoints of the run, through its services while it is live (unless `offline`)."""
        live = None if offline else self.live_address()
        return CheckpointStore(open_store(live or self.offline_address(config), config), self.run_id)

    def offline_store(self, config: Config) -> CheckpointStore:
        """Opens the store of a new run that has no services: an embedded one is a folder, created now."""
        if config.store.url == "embedded":
            (self.path / "s3" / BUCKET).mkdir(parents=True, exist_ok=True)
        return self.checkpoint_store(config, offline=True)

    def remove(self) -> None:
        """Deletes the folder of a run that never started."""
        self.unlock()
        shutil.rmtree(self.path, ignore_errors=True)


def _locked(handle: int) -> bool:
    """Tries for half a second: a process that checks `live` also holds the lock briefly."""
    for attempt in range(_LOCK_TRIES):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            world.sleep(0.05 if attempt < _LOCK_TRIES - 1 else 0.0)
    return False


def new_run_id(config: Config) -> str:
    """Environment, time, and four random digits: `cartpole-v1-20260102-150405-9f3a`."""
    name = "".join(letter if letter.isalnum() else "-" for letter in config.environment.id.rpartition(":")[2]).lower()
    return f"{name[:30].strip('-') or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}-{world.token_hex(2)}"
