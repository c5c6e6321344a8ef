"""Runs whose coordinator is on another machine: how they are found, and how this machine reaches them.

A link is a run's folder like any other, with the run's config, and `elsewhere.json` beside it; every command that takes
a run works on it. The truth about such a run is in Redis (is it live?) and in the store (what has it left?).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shared.checkpoint import CONFIG
from shared.config_sources import dump_config, parse_config, parse_yaml
from shared.errors import ConfigError, ObjectMissing, RunNotFound, UserError
from shared.launch import RESOLVED_CONFIG
from shared.object_store import open_folder
from shared.redis_keys import check_run_id

ELSEWHERE = "elsewhere.json"


@dataclass(frozen=True)
class Submission:
    """What is sent to a cluster: all that another try needs."""

    cluster: str
    """Ray's job server, or the cluster file that leads there."""
    working_dir: str
    """The folder that travels."""
    command: tuple[str, ...]
    """Arguments of `stagecoach` on the cluster."""


@dataclass(frozen=True)
class Elsewhere:
    """Where a run lives, if not here. Holds no secret."""

    redis_url: str | None = None
    """Redis as this machine reaches it (through a tunnel), where that is not as the run's own machines do."""
    endpoint_url: str | None = None
    """The same for the S3 endpoint."""
    submission: Submission | None = None
    """For a run that was submitted from here."""
    job: str | None = None
    """Its newest Ray job."""

    def write(self, folder: Path) -> None:
        """Beside the run's config, whole or not at all."""
        temporary = folder / f"{ELSEWHERE}.partial"
        temporary.write_text(json.dumps(asdict(self), indent=1))
        temporary.replace(folder / ELSEWHERE)


def read_elsewhere(folder: Path) -> Elsewhere | None:
    """None where the run is of this machine."""
    try:
        data = json.loads((folder / ELSEWHERE).read_text())
    except FileNotFoundError:
        return None
    sent = data["submission"]
    if sent is not None:
        data["submission"] = Submission(sent["cluster"], sent["working_dir"], tuple(sent["command"]))
    return Elsewhere(**data)


def link(location: str, runs_dir: Path, endpoint_url: str | None = None, redis_url: str | None = None) -> str:
    """Makes the run at `location` (its folder in a store) known in `runs_dir`; answers its id.

    Raises `RunNotFound`, or what the store raises. A run of this machine stays what it is.
    """
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
        raise ConfigError(f"{run_id} was made by another version of Stagecoach: {error}") from None
    config = config.model_copy(update={"runs_dir": runs_dir})
    path = runs_dir.expanduser().resolve() / run_id
    known = read_elsewhere(path) if path.exists() else Elsewhere()
    if known is None:
        raise UserError(f"{path} is a run of this machine already; name it by its id: {run_id}")
    path.mkdir(parents=True, exist_ok=True)
    replace(known, redis_url=redis_url or known.redis_url, endpoint_url=endpoint_url or known.endpoint_url).write(path)
    (path / RESOLVED_CONFIG).write_text(dump_config(config))
    return run_id
