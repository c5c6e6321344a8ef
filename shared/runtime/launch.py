"""Start and end of a role's process: its launch data, its log file, the command line of the roles without Ray, and
graceful shutdown on SIGTERM (preemption) or Ctrl-C."""

import argparse
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Self, cast

from stagecoach.shared.base.address import Address, RoleName
from stagecoach.shared.base.errors import RunNotFound
from stagecoach.shared.base.local_disk import unwritten
from stagecoach.shared.base.printable import PrintableFormatter, printable
from stagecoach.shared.base.process import handling, report_exits
from stagecoach.shared.base.user_code import extend_imports
from stagecoach.shared.config.loading import load_config, parse_config
from stagecoach.shared.protocol.keys import check_run_id
from stagecoach.shared.protocol.redis_client import connect_redis, without_retries
from stagecoach.shared.runtime.role_process import split, with_length
from stagecoach.shared.runtime.run_context import RunContext, open_run_context

_LOGGER = logging.getLogger("stagecoach.launch")
SERVICES, RESOLVED_CONFIG, LOGS = "services.json", "config.yaml", "logs"
_LOG_BYTES, _LOGS_KEPT = 8 << 20, 3
"""Some 60,000 lines each: more than a person reads, and 32 MiB for each role or service."""


@dataclass(frozen=True)
class RoleLaunch:
    """Plain data from which a role starts in any process: resolved config, address, import path, folder of the run."""

    config: dict[str, Any]
    address: Address
    import_path: tuple[str, ...]
    run_folder: str | None
    environment: bytes | None = None
    """An environment that a program gave as an object, for the roles that act in it."""

    def open(self, name: str) -> RunContext:
        """Sets up this process's imports and log file, then connects as `worker-3`, `trainer` …"""
        extend_imports(self.import_path)
        log_to_file(self.run_folder, name)
        report_exits()
        _LOGGER.info("%s begins", name)
        kind = name.partition("-")[0]
        user = "trainer" if kind == "rank" else kind  # one learner, whatever the number of its processes
        config = parse_config(self.config)
        config.algorithms()  # a user's own brings its kind of policy with it
        return open_run_context(config, self.address, cast(RoleName, user))

    def encoded(self) -> bytes:
        """The length of a JSON object, that object, and the bytes of an environment that a program gave."""
        said = vars(self) | {"address": vars(self.address), "environment": self.environment is not None}
        return with_length(json.dumps(said).encode()) + (self.environment or b"")

    @classmethod
    def decoded(cls, data: bytes) -> Self:
        head, rest = split(data)
        said = json.loads(head)
        said |= {"address": Address(**said["address"]), "import_path": tuple(said["import_path"])}
        return cls(**said | {"environment": rest if said["environment"] else None})


def log_to_file(run_folder: str | None, name: str, keep: Collection[logging.Handler] = ()) -> logging.Handler:
    """Sends this process's log to `<run>/logs/<name>.log`, which is rotated, or else to standard error; and to `keep`,
    of former calls."""
    handler: logging.Handler = logging.StreamHandler()
    if run_folder and (folder := Path(run_folder, LOGS)).is_dir():
        path = folder / f"{name}.log"
        handler = _LogFile(path, maxBytes=_LOG_BYTES, backupCount=_LOGS_KEPT, encoding="utf-8")
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("stagecoach")
    for old in set(logger.handlers).difference(keep):
        logger.removeHandler(old)
        old.close()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return handler


class _LogFile(RotatingFileHandler):
    """Reports a log that cannot be written (its disk is full) once, in one line; nothing else depends on it."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            why = unwritten(error.strerror or str(error), self.baseFilename)
            print(printable(f"the log {self.baseFilename} is not complete: {why}"), file=sys.stderr, flush=True)


def rotate_in_place(path: Path) -> None:
    """Rotates a log that other processes hold open to append to: it is copied, then emptied."""

    def copy_and_empty(source: str, copy: str) -> None:
        shutil.copyfile(source, copy)
        os.truncate(source, 0)

    if path.exists() and path.stat().st_size >= _LOG_BYTES:
        rotating = RotatingFileHandler(path, backupCount=_LOGS_KEPT, delay=True)
        rotating.rotator = copy_and_empty
        rotating.doRollover()
        rotating.close()


def role_arguments(program: str, description: str) -> argparse.ArgumentParser:
    """Returns the command line parser that all roles without Ray share."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {program}",
        description=description,
        epilog="Credentials: STAGECOACH_REDIS_PASSWORD, STAGECOACH_REDIS_USERNAME (or the role's own, such as "
        "STAGECOACH_WORKER_REDIS_PASSWORD; …_PASSWORD_FILE names a file), AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY; "
        "embedded services need none (the run folder has them).",
    )
    parser.add_argument("run", help="run id; with --redis the id alone, else its folder is looked up in --runs-dir")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="folder of this machine's runs")
    parser.add_argument("--config", type=Path, help="the run's config.yaml, where its folder is not on this machine")
    parser.add_argument("--redis", metavar="URL", help="Redis of the run, where its folder is not on this machine")
    parser.add_argument("--store", metavar="URL", help="store of the run, where its folder is not on this machine")
    parser.add_argument("--endpoint-url", metavar="URL", help="S3 endpoint of the store")
    return parser


def launch_from_arguments(arguments: argparse.Namespace) -> RoleLaunch:
    """Returns the launch for arguments of `role_arguments`; raises `RunNotFound` with what is missing."""
    run_id = check_run_id(arguments.run)
    if arguments.redis:
        if not arguments.config or not arguments.store:
            raise RunNotFound("--redis also needs --store and --config (the run's own config.yaml)")
        address = Address(run_id, arguments.redis, arguments.store, arguments.endpoint_url)
        given = {"redis.url": arguments.redis, "store.url": arguments.store, "store.endpoint_url": address.endpoint_url}
        config = load_config(arguments.config, [f"{key}={json.dumps(url)}" for key, url in given.items()], environ={})
        import_path: tuple[str, ...] = (os.getcwd(), str(arguments.config.resolve().parent))
        return RoleLaunch(config.model_dump(mode="json"), address, import_path, None)
    folder = arguments.runs_dir / run_id
    address, import_path = read_services(folder, run_id)
    config = load_config(folder / RESOLVED_CONFIG, environ={})
    return RoleLaunch(config.model_dump(mode="json"), address, import_path, str(folder.resolve()))


def refuse_unreachable(launch: RoleLaunch, user: RoleName) -> None:
    """Raises `RedisUnavailable` at once, for a role that a person starts; a run's own would wait."""
    connect_redis(launch.address, without_retries(parse_config(launch.config)), user).close()


def read_services(folder: Path, run_id: str) -> tuple[Address, tuple[str, ...]]:
    """Returns a live run's address and import path, without its config, which takes long to read."""
    try:
        services = json.loads((folder / SERVICES).read_text())
    except FileNotFoundError:
        raise RunNotFound(f"no live run {run_id!r} in {folder.parent}; `stagecoach runs` lists what is there") from None
    return Address(**services["address"]), tuple(services["import_path"])


@contextmanager
def shutdown_on_signal(
    request_shutdown: Callable[[], None], grace_seconds: float | None = None,
    numbers: tuple[signal.Signals, ...] = (signal.SIGTERM,),
) -> Iterator[None]:  # fmt: skip
    """Calls `request_shutdown` at the first signal; a second one, or the end of the grace, raises `KeyboardInterrupt`.
    For the main thread; restores the former handlers."""
    received = False

    def on_signal(number: int, _: Any) -> None:
        nonlocal received
        if received or number == signal.SIGALRM:
            raise KeyboardInterrupt
        received = True
        if grace_seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, grace_seconds)
        request_shutdown()

    with handling(on_signal, *numbers, signal.SIGALRM):
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
