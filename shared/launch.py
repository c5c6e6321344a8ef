"""How a role's process begins: what it is handed, its log file, and the command line of the roles without Ray."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, cast

from shared.config_sources import load_config, parse_config
from shared.connection import Address, RoleName, connect_redis, impatient
from shared.errors import RunNotFound
from shared.full_disk import unwritten
from shared.last_words import tell_of_exits
from shared.printable import PrintableFormatter, printable
from shared.redis_keys import check_run_id
from shared.role import Role, open_role
from shared.user_code import extend_imports

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
    """Folders of the user's own modules (environments)."""
    run_folder: str | None
    """The run's folder, where this machine has it: log files and signals go there."""

    def open(self, name: str) -> Role:
        """Sets up this process's imports and log file, then connects as `worker-3`, `trainer` …"""
        extend_imports(self.import_path)
        log_to_file(self.run_folder, name)
        tell_of_exits()
        _LOGGER.info("%s begins", name)
        kind = name.partition("-")[0]
        user = "trainer" if kind == "rank" else kind  # one learner, whatever the number of its processes
        config = parse_config(self.config)
        config.algorithm.resolved()  # a user's own brings its kind of policy with it
        return open_role(config, self.address, cast(RoleName, user))


def log_to_file(run_folder: str | None, name: str) -> None:
    """Sends this process's log to `<run>/logs/<name>.log`, or to standard error where there is no such folder.

    The file is rotated (`<name>.log.1` is the one before), so that no run fills a disk with its logs.
    """
    folder = Path(run_folder) / LOGS if run_folder else None
    handler: logging.Handler = (
        _LogFile(folder / f"{name}.log", maxBytes=_LOG_BYTES, backupCount=_LOGS_KEPT, encoding="utf-8")
        if folder and folder.is_dir()
        else logging.StreamHandler()
    )
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("stagecoach")
    for old in logger.handlers[:]:
        logger.removeHandler(old)
        old.close()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


class _LogFile(RotatingFileHandler):
    """A log that cannot be written (its disk is full) is told of once, in one line; nothing else depends on it."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Called for a record that could not be written."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            why = unwritten(error.strerror or str(error), self.baseFilename)
            print(printable(f"the log {self.baseFilename} is not complete: {why}"), file=sys.stderr, flush=True)


def rotate_in_place(path: Path) -> None:
    """The same for a file that other processes hold open to append to: copied, then emptied."""
    if not path.exists() or path.stat().st_size < _LOG_BYTES:
        return
    rotating = RotatingFileHandler(path, backupCount=_LOGS_KEPT, delay=True)
    rotating.rotator = _copy_and_empty
    rotating.doRollover()
    rotating.close()


def _copy_and_empty(source: str, copy: str) -> None:
    shutil.copyfile(source, copy)
    os.truncate(source, 0)


def role_arguments(program: str, description: str) -> argparse.ArgumentParser:
    """The command line that all roles without Ray share."""
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
    """What `role_arguments` parsed → a launch; raises `RunNotFound` with what is missing."""
    run_id = check_run_id(arguments.run)
    folder = arguments.runs_dir / run_id
    if arguments.redis:
        if not arguments.config or not arguments.store:
            raise RunNotFound("--redis also needs --store and --config (the run's own config.yaml)")
        given = {
            "redis.url": arguments.redis,
            "store.url": arguments.store,
            "store.endpoint_url": arguments.endpoint_url,
        }
        config = load_config(arguments.config, [f"{key}={json.dumps(url)}" for key, url in given.items()], environ={})
        address = Address(run_id, arguments.redis, arguments.store, arguments.endpoint_url)
        import_path = (os.getcwd(), str(arguments.config.resolve().parent))
        return RoleLaunch(config.model_dump(mode="json"), address, import_path, None)
    return read_launch(folder, run_id)


def refuse_unreachable(launch: RoleLaunch, user: RoleName) -> None:
    """Where a person starts a role: raises `RedisUnavailable` at once for what a run would wait for."""
    connect_redis(launch.address, impatient(parse_config(launch.config)), user).close()


def read_launch(folder: Path, run_id: str) -> RoleLaunch:
    """The launch of a run whose folder is on this machine and whose services are up."""
    try:
        services = json.loads((folder / SERVICES).read_text())
        config = load_config(folder / RESOLVED_CONFIG, environ={})
    except FileNotFoundError:
        raise RunNotFound(f"no live run {run_id!r} in {folder.parent}; `stagecoach runs` lists what is there") from None
    return RoleLaunch(
        config.model_dump(mode="json"),
        Address(**services["address"]),
        tuple(services["import_path"]),
        str(folder.resolve()),
    )
