"""Checkpoints and sync files: their names, their bytes, and the order in which they are written and read.

A checkpoint is an immutable set of objects under one name, with a manifest written last that holds their SHA-256.
Reading goes from the pointer to the manifest to the objects, each verified. No lock file is needed: each upload has a
folder of its own below the checkpoint's, so that no late request of a replaced trainer touches a newer one's objects.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, Field, FiniteFloat

from stagecoach.shared.base import world
from stagecoach.shared.base.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    DeletionRefused,
    ObjectMissing,
    RunNotFound,
)
from stagecoach.shared.base.printable import JSON_OBJECT
from stagecoach.shared.experience.checkpoint_name import CheckpointName, checkpoint_version
from stagecoach.shared.experience.spaces import EnvironmentDescription

if TYPE_CHECKING:  # a program that only acts with a policy has no S3 client
    from stagecoach.shared.storage.object_store import ObjectStore

T = TypeVar("T")
FORMAT = 1
CONFIG, ENVIRONMENT, READY, POINTER = "config.yaml", "environment.json", ".ready", ".checkpoint"
PROMOTED, MARKS = ".promoted", ("latest", "best", "final", "promoted")
FINISHED, STATUS, CHECKPOINTS, MANIFEST = ".finished", "training_status.json", "checkpoints/", "manifest.json"

CLEARED = b"{}"
"""The content of a sync file that was taken away in a store that does not delete."""
_READ_PAUSES_SECONDS = (0.05, 0.1, 0.2, 0.4, 0.8)


def _check_object_name(name: str) -> str:
    parts = name.split("/")
    if not name.isprintable() or "\\" in name or not {"", ".", ".."}.isdisjoint(parts):
        raise ValueError(f"{name!r} is not the name of an object within a checkpoint")
    return name


ObjectName = Annotated[str, AfterValidator(_check_object_name)]
UnixTime = Annotated[FiniteFloat, Field(ge=0, le=1e11)]
"""Seconds, within what a clock can show."""


class StoredObject(BaseModel, frozen=True, extra="forbid"):
    bytes: int
    sha256: str


class Manifest(BaseModel, frozen=True, extra="forbid"):
    """The objects of a checkpoint and its origin."""

    format: int = FORMAT
    run_id: str
    name: str
    version: int
    epoch: int
    created: UnixTime
    log_position: str
    parent: str | None
    """The checkpoint that this one was trained from."""
    objects: dict[ObjectName, StoredObject]
    provenance: dict[str, Any]
    """Code version, libraries, config hash, seed, log range, policy versions, lag histogram, ledger through the
    position, counters; newest score and accounting when it was written."""

    @property
    def folder(self) -> str:
        """Folder of this upload, named by epoch, time and contents: two trainers may reach the same checkpoint, with
        equal or (if Redis has lost a part of the log in between) other contents."""
        hashes = {name: item.sha256 for name, item in self.objects.items()}
        upload = json.dumps([self.epoch, self.created, hashes], sort_keys=True).encode()
        return f"{CHECKPOINTS}{self.name}/{hashlib.sha256(upload).hexdigest()[:16]}/"

    @property
    def rank(self) -> tuple[int, float]:
        """Order of the uploads of a checkpoint, of which the highest counts: that of the newest trainer."""
        return self.epoch, self.created

    @property
    def total_bytes(self) -> int:
        return sum(item.bytes for item in self.objects.values())


class Pointer(BaseModel, frozen=True, extra="forbid"):
    """`.checkpoint`: the names that matter, and the hash of the newest manifest."""

    latest: CheckpointName
    best: CheckpointName | None = None
    final: CheckpointName | None = None
    epoch: int
    manifest_sha256: str


class Promotion(BaseModel, frozen=True, extra="forbid"):
    """`.promoted`: the checkpoint that a person chose for deployment. Only `promote` writes it, so it never races with
    the trainer's pointer; the trainer keeps the checkpoint that it names."""

    checkpoint: CheckpointName
    manifest_sha256: str
    time: UnixTime


@dataclass(frozen=True)
class Checkpoint:
    manifest: Manifest
    objects: dict[str, bytes]


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        return JSON_OBJECT.validate_python(json.loads(data))  # pydantic's own parser takes no half of a surrogate pair
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None


class CheckpointStore:
    def __init__(self, store: ObjectStore, run_id: str) -> None:
        self.store, self.run_id = store, run_id

    # Writing, in this order: objects, verify, manifest; then the caller moves the pointer.

    def write(self, manifest: Manifest, objects: dict[str, bytes]) -> bytes:
        """Stores a checkpoint up to and including its manifest; returns the manifest's bytes.

        An existing checkpoint of that name with the same objects keeps its manifest (a restarted trainer reaches it
        again), and its damaged objects are replaced. Any other stays in the store, and no longer counts.
        """
        data, existing = manifest.model_dump_json(indent=1).encode(), False
        with contextlib.suppress(CheckpointError):
            former_data, former = self.read_manifest(manifest.name)
            if former.objects == manifest.objects:
                data, manifest, existing = former_data, former, True
        wanted = [name for name in objects if not existing or not self._holds(manifest, name)]
        for name in wanted:
            self.store.put(manifest.folder + name, objects[name])
        for name in wanted:
            if not self._holds(manifest, name):
                raise CheckpointDamaged(f"{manifest.name}/{name}: the store gave back other bytes than it was given")
        if not existing:
            self.store.put(manifest.folder + MANIFEST, data)
        return data

    def _holds(self, manifest: Manifest, name: str) -> bool:
        try:
            self.read_object(manifest, name)
        except CheckpointDamaged:
            return False
        return True

    def write_pointer(self, pointer: Pointer) -> None:
        """Moves the pointer; call only after the manifest it names is in the store."""
        self.store.put(POINTER, pointer.model_dump_json(indent=1).encode())

    def write_promotion(self, promotion: Promotion | None) -> None:
        """Sets or removes the mark of what is deployed; call only after the checkpoint was verified."""
        if promotion is None:
            self.clear_marker(PROMOTED)
        else:
            self.store.put(PROMOTED, promotion.model_dump_json(indent=1).encode())

    def write_marker(self, key: str, content: dict[str, Any]) -> None:
        """Writes a sync file with JSON content (some stores refuse empty objects)."""
        self.store.put(key, json.dumps(content, indent=1).encode())

    def clear_marker(self, key: str) -> None:
        """Deletes a sync file, or empties it in a store that does not delete."""
        try:
            self.store.delete(key)
        except DeletionRefused:
            self.store.put(key, CLEARED)

    # Reading.

    def marker(self, key: str) -> dict[str, Any] | None:
        """Returns the content of a sync file, or None if it is missing; raises `CheckpointDamaged`."""
        return self._sync_file(key, _json_object, f"{key} of run {self.run_id} is not a JSON object")

    def pointer(self) -> Pointer | None:
        hint = f"{POINTER} of run {self.run_id} cannot be read; the checkpoints may be intact"
        return self._sync_file(POINTER, Pointer.model_validate_json, hint)

    def promotion(self) -> Promotion | None:
        hint = f"{PROMOTED} of run {self.run_id} cannot be read; promote a checkpoint again, or clear the mark"
        return self._sync_file(PROMOTED, Promotion.model_validate_json, hint)

    def description(self) -> EnvironmentDescription:
        """Returns agents and spaces of the run; raises `RunNotFound`, `CheckpointDamaged`, or a store error."""
        try:
            return EnvironmentDescription.from_dict(self.read_whole(ENVIRONMENT, json.loads))
        except ObjectMissing:
            raise RunNotFound(f"the store has no run {self.run_id!r} ({ENVIRONMENT} is missing)") from None
        except ValueError as error:
            raise CheckpointDamaged(
                f"{ENVIRONMENT} of run {self.run_id} is not what was written there "
                f"({type(error).__name__}: {error}); bring it back, or start a new run"
            ) from None

    def _sync_file(self, key: str, parse: Callable[[bytes], T], otherwise: str) -> T | None:
        try:
            return self.read_whole(key, lambda data: None if data == CLEARED else parse(data))
        except ObjectMissing:
            return None
        except ValueError:
            raise CheckpointDamaged(otherwise) from None

    def read_whole(self, key: str, parse: Callable[[bytes], T]) -> T:
        """Returns the parsed object; raises `ObjectMissing`, or the `ValueError` of `parse`. Some stores show half an
        object before it is complete, so one that cannot be parsed is read again, for some 1.5 s."""
        for pause in _READ_PAUSES_SECONDS:
            with contextlib.suppress(ValueError):
                return parse(self.store.get(key))
            world.sleep(pause)
        return parse(self.store.get(key))

    def marked(self, mark: str) -> str | None:
        """Returns the checkpoint that one of `MARKS` stands for, if any."""
        if mark == "promoted":
            promotion = self.promotion()
            return promotion.checkpoint if promotion else None
        found: str | None = getattr(self.pointer(), mark, None)
        return found

    def resolve(self, name: str) -> str:
        """Returns the name of a checkpoint, given itself or one of `MARKS`; raises `CheckpointNotFound`."""
        found, known = self.marked(name) if name in MARKS else name, self.names()
        if found in known:
            if name == "promoted" and (promotion := self.promotion()) and promotion.checkpoint == found:
                digest = hashlib.sha256(self.read_manifest(found)[0]).hexdigest()
                if promotion.manifest_sha256 != digest:
                    raise CheckpointDamaged(f"the manifest of {found} is not the one that was promoted")
            return found
        if not known:
            raise CheckpointNotFound(f"run {self.run_id} has no checkpoint yet")
        what = f"no checkpoint {name!r}" if found == name else f"no {name} checkpoint"
        gone = f" ({found} is gone)" if found not in (None, name) else ""
        marks = ", ".join(MARKS)
        raise CheckpointNotFound(f"run {self.run_id} has {what}{gone}; there are: {', '.join(known)}; or say {marks}")

    def preferred(self, name: str | None = None) -> str:
        """Returns the checkpoint of a name or mark; by default the promoted one, else the best, else the newest."""
        return self.resolve(name or next((mark for mark in ("promoted", "best") if self.marked(mark)), "latest"))

    def names(self) -> list[str]:
        """Lists all checkpoint folders in the store, oldest version first, complete or not."""
        return checkpoint_folders(self.store, CHECKPOINTS)

    def manifest(self, name: str) -> Manifest:
        return self.read_manifest(name)[1]

    def read_manifest(self, name: str, sha256: str | None = None) -> tuple[bytes, Manifest]:
        """Returns the manifest of `name` and its bytes: with `sha256` the one with that hash, else that of the upload
        that counts (`Manifest.rank`). Raises `CheckpointDamaged` if all are damaged."""
        found: list[tuple[bytes, Manifest]] = []
        problems: list[CheckpointDamaged] = []
        root = f"{CHECKPOINTS}{name}/"
        for upload in self.store.folders(root):
            try:
                found.append(self._read_upload(name, f"{root}{upload}/"))
            except ObjectMissing:
                continue
            except CheckpointDamaged as error:
                problems.append(error)
        wanted = [item for item in found if sha256 in (None, hashlib.sha256(item[0]).hexdigest())]
        if wanted:
            return max(wanted, key=lambda item: item[1].rank)
        if problems:
            raise problems[0]
        if found:
            raise CheckpointDamaged(f"the manifest of {name} is not the one that the pointer names")
        raise CheckpointNotFound(f"run {self.run_id} has no (complete) checkpoint {name}")

    def _read_upload(self, name: str, folder: str) -> tuple[bytes, Manifest]:
        try:
            data, raw = self.read_whole(folder + MANIFEST, lambda data: (data, _json_object(data)))
            if raw.get("format") != FORMAT:
                raise CheckpointDamaged(
                    f"{name} has format {raw.get('format')!r}; this version of Stagecoach reads format {FORMAT}"
                )
            manifest = Manifest.model_validate(raw)
        except ValueError as error:
            raise CheckpointDamaged(f"the manifest of {name} cannot be read: {' '.join(str(error).split())}") from None
        if manifest.run_id != self.run_id or manifest.name != name:
            raise CheckpointDamaged(
                f"the manifest in {name} belongs to {manifest.name} of run {manifest.run_id}, not to run {self.run_id}"
            )
        if manifest.folder != folder:
            raise CheckpointDamaged(f"the manifest of {name} was altered: it is not that of {folder}")
        return data, manifest

    def load_latest(self, only: str = "") -> Checkpoint | None:
        """Loads the pointer's checkpoint, verified by its hash of the manifest; None before the first checkpoint."""
        pointer = self.pointer()
        if pointer is None:
            return None
        return self.load(self.read_manifest(pointer.latest, pointer.manifest_sha256)[1], only)

    def load(self, checkpoint: str | Manifest, only: str | tuple[str, ...] = "") -> Checkpoint:
        """Loads a checkpoint by its name or manifest, every object verified; `only` restricts it to these endings."""
        manifest = self.manifest(checkpoint) if isinstance(checkpoint, str) else checkpoint
        objects = {key: self.read_object(manifest, key) for key in manifest.objects if key.endswith(only)}
        return Checkpoint(manifest, objects)

    def read_object(self, manifest: Manifest, key: str) -> bytes:
        """Returns one verified object of a checkpoint; raises `CheckpointDamaged`."""
        name, wanted = manifest.name, manifest.objects[key]
        try:
            data = self.store.get(manifest.folder + key)
        except ObjectMissing:
            raise CheckpointDamaged(f"{name} lacks its object {key}") from None
        if stored(data) != wanted:
            size = f"{len(data)} bytes, the manifest says {wanted.bytes}"
            how = size if len(data) != wanted.bytes else "its SHA-256 is not the manifest's"
            raise CheckpointDamaged(f"{name}/{key} was altered: {how}")
        return data

    def newest_good(self) -> tuple[Checkpoint, list[str]]:
        """Returns the newest checkpoint that verifies, and a line for each newer one that does not.

        A checkpoint beyond the pointer, of an older trainer than the pointer's, came late: its experience may be in no
        log any more. Raises `CheckpointNotFound` without checkpoints, `CheckpointDamaged` if all are damaged.
        """
        names, problems = list[str](), list[str]()
        while names != (names := self.names()):  # again where others were written, and these pruned, meanwhile
            found, problems = self._newest_good(names)
            if found is not None:
                return found, problems
        if problems:
            raise CheckpointDamaged(f"no usable checkpoint in run {self.run_id}: " + "; ".join(problems))
        raise CheckpointNotFound(f"run {self.run_id} has no checkpoint yet")

    def _newest_good(self, names: list[str]) -> tuple[Checkpoint | None, list[str]]:
        problems: list[str] = []
        epoch, newest = 0, 0
        with contextlib.suppress(CheckpointDamaged):  # the trainer writes it again
            if pointer := self.pointer():
                epoch, newest = pointer.epoch, checkpoint_version(pointer.latest) or 0
        for name in reversed(names):
            try:
                manifest = self.manifest(name)
                if manifest.epoch < epoch and manifest.version > newest:
                    problems.append(f"{name} came late, from a trainer (epoch {manifest.epoch}) that had been replaced")
                    continue
                return self.load(manifest), problems
            except CheckpointNotFound:
                continue  # never completed: it was not a checkpoint yet
            except CheckpointDamaged as error:
                problems.append(str(error))
        return None, problems

    def delete(self, name: str) -> None:
        """Removes a checkpoint, manifests first, so that no reader takes the rest for a complete one."""
        folder = f"{CHECKPOINTS}{name}/"
        for upload in self.store.folders(folder):
            self.store.delete(f"{folder}{upload}/{MANIFEST}")
        for key in self.store.keys(folder):
            self.store.delete(key)


def checkpoint_folders(store: ObjectStore, prefix: str) -> list[str]:
    """Lists the folders below `prefix` that are named like checkpoints, oldest version first."""
    found = [name for name in store.folders(prefix) if checkpoint_version(name) is not None]
    return sorted(found, key=lambda name: (checkpoint_version(name) or 0, name))


def stored(data: bytes) -> StoredObject:
    return StoredObject(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def describe_objects(objects: dict[str, bytes]) -> dict[str, StoredObject]:
    return {name: stored(data) for name, data in sorted(objects.items())}
