"""Evidence of a run in one folder, for a reviewer or a safety case; docs/how-to/evidence.md describes its files.

It only reads: config, checkpoints, sync files, metrics and the archived log. Of an ended run, two calls on one machine
write equal bytes.
"""

import csv
import hashlib
import importlib.metadata
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stagecoach.coordinator.catalog.checkpoint_lookup import named_code
from stagecoach.coordinator.catalog.checkpoint_operations import list_checkpoints
from stagecoach.coordinator.catalog.evidence_readme import readme
from stagecoach.coordinator.catalog.metric_tables import write_csv
from stagecoach.coordinator.catalog.status import Status
from stagecoach.shared.base.code_version import code_version
from stagecoach.shared.base.errors import ArchiveIncomplete, CheckpointError, MetricsDamaged, UserError
from stagecoach.shared.base.local_disk import TEMPORARY
from stagecoach.shared.config.loading import dump_config
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.schema.section import leaves
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.storage.checkpoint_store import ENVIRONMENT, FINISHED, MANIFEST, CheckpointStore, Manifest
from stagecoach.shared.storage.log_archive import Archive
from stagecoach.shared.storage.metric_log import EPISODES, STREAMS, TRAIN, Rows
from stagecoach.shared.storage.shared_objects import SHARED_OBJECTS
from stagecoach.trainer_node.checkpointing.retention import unless_damaged
from stagecoach.trainer_node.checkpointing.verification import State, Verdict
from stagecoach.trainer_node.replay.drops import DroppedEntry, dropped_entries
from stagecoach.trainer_node.replay.rerun import BEGINNING, earliest_start
from stagecoach.trainer_node.state.snapshot import libraries, written_with

FORMAT = 1
SUMMARY, SUMS, CURVES = "evidence.json", "SHA256SUMS", "curves.png"
_AS_TEXT: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace", "newline": ""}
_DROP_COLUMNS = list(DroppedEntry.__annotations__)
_CHECKPOINT_COLUMNS = [
    "checkpoint", "version", "env_steps", "created", "marks", "mean_return", "confirmed_return", "verdict", "problems",
    "object", "bytes", "sha256",
]  # fmt: skip


@dataclass(frozen=True)
class Sources:
    """The data of a run that evidence is written from."""

    checkpoints: CheckpointStore
    config: Config
    status: Status
    verdicts: list[Verdict]
    read_metrics: Callable[[str], Iterable[Rows]]
    """Reads the rows of a stream from its beginning at each call."""
    draw_curves: Callable[[Path], None]
    replay: dict[str, Any] | None
    """Result of a replay from the run's start, if one was requested."""
    trained_here: bool
    """This machine started the run."""


@dataclass(frozen=True)
class Evidence:
    """The folder that was written, and the content of its evidence.json."""

    folder: Path
    summary: dict[str, Any]

    @property
    def damaged(self) -> list[str]:
        """Names what is damaged, and a replay that did not give the same objects."""
        replay = self.summary["replay"]
        return [*self.summary["damaged"], *(["replay"] if replay and not replay["equal"] else [])]


def check_target(target: Path) -> None:
    """Raises `UserError` unless the folder is missing or empty."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists and is not an empty folder; choose another folder")


def write_evidence(target: Path, sources: Sources) -> Evidence:
    """Writes the folder, which appears complete or not at all; raises `UserError` if the target is not empty."""
    check_target(target)
    parent, name = target.absolute().parent, target.absolute().name
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=parent, ignore_cleanup_errors=True) as temporary:
            folder = Path(temporary, name)
            folder.mkdir()
            summary = _Writer(folder, sources).write()
            os.rename(folder, target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from None
    return Evidence(target, summary)


class _Writer:
    def __init__(self, folder: Path, sources: Sources) -> None:
        self._folder, self._from, self._store = folder, sources, sources.checkpoints
        self._absent: dict[str, str] = {}
        """Missing part of the folder → the reason, and the setting that would have kept it."""
        self._damaged = [verdict.name for verdict in sources.verdicts if verdict.state is State.DAMAGED]
        self._manifests: dict[str, tuple[str, Manifest]] = {}
        """Name → SHA-256 of the manifest, and the manifest, of the checkpoints that can be read."""
        for verdict in sources.verdicts:
            try:
                data, manifest = self._store.read_manifest(verdict.name)
                self._manifests[verdict.name] = hashlib.sha256(data).hexdigest(), manifest
            except CheckpointError:
                continue  # the verdict says why, or a live run has pruned it since
        pointer = unless_damaged(self._store.pointer)
        last = (pointer.final or pointer.latest) if pointer else None
        known = list(self._manifests)  # oldest version first
        self._goal = last if last in known else known[-1] if known else None

    def write(self) -> dict[str, Any]:
        status, config = self._from.status, self._from.config
        newest = self._manifests[self._goal][1] if self._goal else None
        finished = unless_damaged(lambda: self._store.marker(FINISHED)) or {}
        ledger, source = self._ledger(newest)
        self._put("config.yaml", dump_config(config))
        self._put("environment.json", self._store.read_whole(ENVIRONMENT, bytes.decode))
        self._put("ledger.json", _json(ledger))
        self._put("packages.txt", "".join(f"{line}\n" for line in self._packages(newest)))
        replay_from = self._replay_from(newest)
        drops = self._write_drops(ledger, replay_from)
        checkpoints = self._write_checkpoints()
        self._write_metrics()
        fields = leaves(config.model_dump(mode="json"))
        hashes = {name: value for name, value in fields.items() if value and name.endswith("sha256")}
        if own := ", ".join(f"{name}={path}" for name, path in named_code(config).items()):
            self._absent["hashes of own code"] = f"the run records only its names: {own}; keep it with this folder"
        total, version = ledger.get("total", {}), newest.version if newest else -1
        if total.get("balances") is False:
            self._damaged.append("ledger")
        if newest and newest.provenance["config_hash"] != config.hash():
            self._damaged.append("config.yaml")
            self._absent["config that trained"] = (
                f"{newest.name} was trained with the hash {newest.provenance['config_hash']}, and config.yaml has "
                f"another: a field that decides learning was changed, or this version of Stagecoach has other fields"
            )
        state = f"live, up to version {version}" if status.live else status.state.value
        summary = {
            "format": FORMAT, "run_id": status.run_id, "state": state, "reason": status.reason if finished else "",
            "ended": finished.get("time"), "up_to": self._goal, "version": version, "written_by": code_version(),
            "config_hash": config.hash(), "seeds": {"config": config.seed, "checkpoints": self._said("seed")},
            "code": self._said("code_version"), "computed_with": self._said("computed_with"),
            "hashes_in_config": hashes, "initialized_from": self._said("initialized_from"),
            "counters": newest.provenance["counters"] if newest else None,
            "ledger": {"from": source, "balances": total.get("balances"), "consumed": total.get("consumed")},
            "drops": drops, "checkpoints": checkpoints, "damaged": self._damaged, "absent": self._absent,
            "replay": self._from.replay, "replay_from": replay_from,
        }  # fmt: skip
        self._put(SUMMARY, _json(summary))
        files = sorted(path.relative_to(self._folder).as_posix() for path in self._folder.rglob("*") if path.is_file())
        self._put("README.md", readme(summary, files))
        sums = {name: hashlib.sha256((self._folder / name).read_bytes()).hexdigest() for name in (*files, "README.md")}
        self._put(SUMS, "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))
        return summary

    def _put(self, name: str, text: str) -> None:
        path = self._folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, **_AS_TEXT)

    def _table(self, name: str, columns: list[str], rows: Iterable[Mapping[str, Any]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(rows)
        self._put(name, text.getvalue())

    def _said(self, key: str) -> list[dict[str, Any]]:
        """Values in the checkpoints' provenance, each with the first and the last of successive checkpoints."""
        found: list[dict[str, Any]] = []
        for name, (_, manifest) in self._manifests.items():
            value = manifest.provenance.get(key)
            if found and found[-1]["value"] == value:
                found[-1]["last"] = name
            elif value is not None:
                found.append({"value": value, "first": name, "last": name})
        return found

    def _replay_from(self, newest: Manifest | None) -> str | None:
        """Returns where a replay to the newest checkpoint may begin; None without an archive."""
        if newest is None or not Archive(self._store.store, self._store.run_id).segments():
            return None
        start = earliest_start(self._from.config, newest, self._manifests)
        if start != BEGINNING and self._manifests[start][1].version:
            self._absent["positions of earlier drops"] = f"the log leads to {newest.name} only from {start} on"
        return start

    def _ledger(self, newest: Manifest | None) -> tuple[dict[str, Any], str]:
        """Returns the ledger of all workers, and its source."""
        if self._from.status.ledger:
            return self._from.status.ledger, "Redis of the live run" if self._from.status.live else FINISHED
        if newest and newest.provenance.get("accounting"):
            return newest.provenance["accounting"], f"the manifest of {newest.name}"
        self._absent["ledger"] = "neither Redis nor the store has it: the run has no complete checkpoint"
        return {}, ""

    def _packages(self, newest: Manifest | None) -> Iterator[str]:
        yield "# What trained the newest checkpoint, as its manifest says"
        trained = written_with(newest) if newest else {}
        yield from (f"{name}: {value}" for name, value in sorted(trained.items()))
        other = {name for name, version in libraries().items() if trained.get(name) != version}
        if other or not self._from.trained_here:
            why = f"another version of {', '.join(sorted(other))} is here" if other else "the run was started elsewhere"
            self._absent["installed packages"] = f"{why}; write the evidence on a machine that trained the run"
            return
        yield "# Packages installed on the machine that wrote this folder, which started the run"
        there = {dist.name: dist.version for dist in importlib.metadata.distributions() if dist.name}
        yield from (f"{name}=={version}" for name, version in sorted(there.items()))

    def _write_drops(self, ledger: Mapping[str, Any], start: str | None) -> dict[str, Any]:
        """Writes a row for each dropped entry whose position is known, and one for the rest of each account."""
        entries = list[DroppedEntry]()
        why = f"refused when it was pushed, or dropped after {self._goal}, or before {start}: no position"
        try:
            if self._goal is not None and self._manifests[self._goal][1].version:  # else it has taken no entry
                entries = dropped_entries(self._store, self._from.config, start or BEGINNING, self._goal)
        except (UserError, CheckpointError) as error:
            why = "the position is not known"
            self._absent["positions of drops"] = str(error)
            self._damaged += self._damage_behind(error)
        rows = [asdict(entry) for entry in entries]
        for worker, line in sorted(ledger.items()):
            for reason, count in sorted(line["dropped"].items()) if worker != "total" else ():
                listed = [entry for entry in entries if (entry.worker, entry.reason) == (worker, reason)]
                rest = {unit: count[unit] - sum(getattr(one, unit) for one in listed) for unit in count}
                if rest["fragments"] > 0:
                    rows.append({"worker": worker, "reason": reason, **rest, "detail": why})
        self._table("drops.csv", _DROP_COLUMNS, rows)
        counts = {unit: sum(row[unit] for row in rows) for unit in ("fragments", "transitions")}
        return {**counts, "with_position": sum(entry.fragments for entry in entries)}

    def _damage_behind(self, error: Exception) -> list[str]:
        """Names what is damaged if the archive cannot be judged again; that of a live run ends a little behind."""
        if isinstance(error, CheckpointError):  # verdicts name checkpoints; those of a live run may be pruned meanwhile
            return ["environment.json"] if unless_damaged(self._store.description) is None else []
        archived = Archive(self._store.store, self._store.run_id).segments()
        ended = unless_damaged(lambda: self._store.marker(FINISHED)) is not None
        return ["experience"] if isinstance(error, ArchiveIncomplete) and archived and ended else []

    def _write_checkpoints(self) -> list[dict[str, Any]]:
        listed = {entry["name"]: entry for entry in unless_damaged(lambda: list_checkpoints(self._store)) or []}
        rows, found = list[dict[str, Any]](), list[dict[str, Any]]()
        for verdict in self._from.verdicts:
            entry = listed.get(verdict.name, {})
            scores, marks = entry.get("evaluation") or {}, entry.get("marks", [])
            row = {
                "checkpoint": verdict.name, "marks": " ".join(marks), "mean_return": scores.get("mean_return"),
                "confirmed_return": (scores.get("confirmation") or {}).get("mean_return"),
                "verdict": verdict.state.value, "problems": "; ".join(verdict.problems),
            }  # fmt: skip
            told: dict[str, Any] = {"name": verdict.name, "verdict": verdict.state, "problems": verdict.problems}
            objects = [dict[str, Any]()]
            if verdict.name in self._manifests:
                digest, manifest = self._manifests[verdict.name]
                row |= {"version": manifest.version, "created": manifest.created}
                row["env_steps"] = manifest.provenance["counters"]["train"]["env_steps"]
                told |= {"manifest_sha256": digest, "parent": manifest.parent, "log_position": manifest.log_position}
                shared = manifest.provenance.get("shared_objects", ())
                objects = [{"object": MANIFEST, "sha256": digest}]
                objects += [{"object": key, **item.model_dump()} for key, item in sorted(manifest.objects.items())]
                objects += [{"object": SHARED_OBJECTS + sha256, "sha256": sha256} for sha256 in shared]
            rows += [row | item for item in objects]
            found.append(told | {"marks": marks, "evaluation": scores or None})
        self._table("checkpoints.csv", _CHECKPOINT_COLUMNS, rows)
        return found

    def _trained(self) -> bool:
        """Returns true if the run ended in order after updates of which there are rows of metrics."""
        if self._goal is None or not unless_damaged(lambda: self._store.marker(FINISHED)):
            return False
        counters = Counters(**self._manifests[self._goal][1].provenance["counters"]["train"])
        return self._from.config.metrics.every.index(counters) > 0

    def _write_metrics(self) -> None:
        for stream in STREAMS:
            path = self._folder / "metrics" / f"{stream}.csv"
            path.parent.mkdir(exist_ok=True)
            try:
                with path.open("w", **_AS_TEXT) as file:
                    count = write_csv(partial(self._from.read_metrics, stream), stream, file)
            except MetricsDamaged as error:
                self._damaged.append(f"metrics/{stream}")
                count, self._absent[f"metrics/{stream}.csv"] = 0, str(error)
            if stream == TRAIN and not count and self._trained():
                self._damaged.append(f"metrics/{stream}")
                self._absent[f"metrics/{stream}.csv"] = f"{self._goal} has updates, and the store has no row of them"
            if not count:
                path.unlink()
                setting = "; metrics.episodes: true records them" if stream == EPISODES else ""
                self._absent.setdefault(f"metrics/{stream}.csv", f"the run has recorded no such rows{setting}")
        try:
            self._from.draw_curves(self._folder / CURVES)
        except (UserError, MetricsDamaged) as error:
            if isinstance(error.__context__, OSError):  # a full disk, as for the other files
                raise error.__context__ from None
            self._absent[CURVES] = str(error)


def _json(data: Any) -> str:
    return json.dumps(data, indent=1, sort_keys=True) + "\n"
