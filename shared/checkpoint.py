"""Checkpoints and sync files: their names, their bytes, and the order in which they are written and read.

A checkpoint is an immutable set of objects under one name, with a manifest written last that holds the SHA-256 of all
others. A pointer names the newest; `.ready` and `.finished` are for whoever waits. Reading goes pointer → manifest →
objects, each verified, so that half a checkpoint can never be seen. There is no lock file: each upload has a folder of
its own below the checkpoint's, so that no late request of a trainer that was replaced meets the objects of a newer one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, FiniteFloat

from shared.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, ObjectMissing

if TYPE_CHECKING:
    from shared.object_store import ObjectStore  # whoever only acts with a policy has no S3 client

T = TypeVar("T")
FORMAT = 2
CONFIG, ENVIRONMENT, READY, POINTER = "config.yaml", "environment.json", ".ready", ".checkpoint"
PROMOTED, MARKS = ".promoted", ("latest", "best", "final", "promoted")
FINISHED, STATUS, CHECKPOINTS, MANIFEST = ".finished", "training_status.json", "checkpoints/", "manifest.json"

_NAME = re.compile(r"(\d+)_Step-(\d+)\.ckpt")
_READ_PAUSES_SECONDS = (0.05, 0.1, 0.2, 0.4, 0.8)


def checkpoint_name(version: int, env_steps: int) -> str:
    """`12_Step-24576.ckpt`: policy version and env steps trained on."""
    return f"{version}_Step-{env_steps}.ckpt"


def checkpoint_version(name: str) -> int | None:
    """The policy version in a checkpoint's name; None for a folder that is no checkpoint."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def _check_name(name: str) -> str:
    """A checkpoint's name, and nothing that leads elsewhere."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a checkpoint, like {checkpoint_name(12, 24576)}")
    return name


def _check_object_name(name: str) -> str:
    """A path within the checkpoint's folder, on every kind of store."""
    parts = name.split("/")
    if not name.isprintable() or "\\" in name or not {"", ".", ".."}.isdisjoint(parts):
        raise ValueError(f"{name!r} is not the name of an object within a checkpoint")
    return name


CheckpointName = Annotated[str, AfterValidator(_check_name)]
ObjectName = Annotated[str, AfterValidator(_check_object_name)]
UnixTime = Annotated[FiniteFloat, Field(ge=0, le=1e11)]
"""Seconds; what a clock can have said."""


class StoredObject(BaseModel):
    """One object of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: int
    sha256: str


class Manifest(BaseModel):
    """What a checkpoint is made of and where it comes from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    run_id: str
    name: str
    version: int
    """Policy version."""
    epoch: int
    """The trainer that wrote it."""
    created: UnixTime
    log_position: str
    """The last log entry that is part of it."""
    parent: str | None
    """The checkpoint that this one was trained from."""
    objects: dict[ObjectName, StoredObject]
    provenance: dict[str, Any]
    """Code version, what it was computed with, config hash, seed, log range, policy versions, lag histogram, ledger
    through the position, counters; newest score and books when it was written."""

    @property
    def folder(self) -> str:
        """Of this upload, with objects and manifest. It follows from who wrote what when: two trainers may come to the
        same checkpoint, with equal or (where Redis has lost a part of the log in between) with other contents."""
        hashes = {name: item.sha256 for name, item in self.objects.items()}
        upload = json.dumps([self.epoch, self.created, hashes], sort_keys=True).encode()
        return f"{CHECKPOINTS}{self.name}/{hashlib.sha256(upload).hexdigest()[:16]}/"

    @property
    def rank(self) -> tuple[int, float]:
        """Of several uploads of a checkpoint the one with the highest counts: that of the newest trainer."""
        return self.epoch, self.created

    @property
    def total_bytes(self) -> int:
        """Size of all objects together."""
        return sum(item.bytes for item in self.objects.values())


class Pointer(BaseModel):
    """`.checkpoint`: the names that matter, and the hash of the newest manifest."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    latest: CheckpointName
    best: CheckpointName | None = None
    final: CheckpointName | None = None
    epoch: int
    manifest_sha256: str


class Promotion(BaseModel):
    """`.promoted`: the checkpoint that a person chose for deployment. Only `promote` writes it, so that it never races
    with the trainer's pointer; the trainer only reads it, and keeps what it names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint: CheckpointName
    manifest_sha256: str
    time: UnixTime


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint, in memory."""

    manifest: Manifest
    objects: dict[str, bytes]


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except RecursionError:
        raise ValueError("JSON that is nested too deep") from None
    if not isinstance(content, dict):
        raise ValueError("another kind of JSON")
    return content


class CheckpointStore:
    """Writes and reads the checkpoints and sync files of one run."""

    def __init__(self, store: ObjectStore, run_id: str) -> None:
        self.store = store
        self.run_id = run_id

    # Writing, in this order: objects, verify, manifest; then the caller moves the pointer.

    def write(self, manifest: Manifest, objects: dict[str, bytes]) -> bytes:
        """Stores a checkpoint up to and including its manifest; answers the manifest's bytes.

        An existing checkpoint of that name with the same objects keeps its manifest (a restarted trainer arrives at it
        again), and what was damaged of it is written anew. Any other stays as it is, and counts no more.
        """
        existing = self._existing(manifest)
        data, manifest = existing or (manifest.model_dump_json(indent=1).encode(), manifest)
        wanted = [name for name in objects if existing is None or not self._holds(manifest, name)]
        for name in wanted:
            self.store.put(manifest.folder + name, objects[name])
        for name in wanted:
            if not self._holds(manifest, name):
                raise CheckpointDamaged(f"{manifest.name}/{name}: the store gave back other bytes than it was given")
        if existing is None:
            self.store.put(manifest.folder + MANIFEST, data)
        return data

    def _holds(self, manifest: Manifest, name: str) -> bool:
        try:
            data = self.store.get(manifest.folder + name)
        except ObjectMissing:
            return False
        return hashlib.sha256(data).hexdigest() == manifest.objects[name].sha256

    def _existing(self, manifest: Manifest) -> tuple[bytes, Manifest] | None:
        with contextlib.suppress(CheckpointError):
            data, found = self.read_manifest(manifest.name)
            if found.objects == manifest.objects:
                return data, found
        return None

    def write_pointer(self, pointer: Pointer) -> None:
        """Moves the pointer; call only after the manifest it names is in the store."""
        self.store.put(POINTER, pointer.model_dump_json(indent=1).encode())

    def write_promotion(self, promotion: Promotion | None) -> None:
        """Sets the mark of what is deployed, or takes it away; call only after the checkpoint was verified."""
        if promotion is None:
            self.store.delete(PROMOTED)
        else:
            self.store.put(PROMOTED, promotion.model_dump_json(indent=1).encode())

    def write_marker(self, key: str, content: dict[str, Any]) -> None:
        """A sync file with JSON content (some stores refuse empty objects)."""
        self.store.put(key, json.dumps(content, indent=1).encode())

    # Reading.

    def marker(self, key: str) -> dict[str, Any] | None:
        """The content of a sync file, or None where it isn't there; raises `CheckpointDamaged` for other bytes."""
        return self._sync_file(key, _json_object, f"{key} of run {self.run_id} is not a JSON object")

    def pointer(self) -> Pointer | None:
        """The pointer, or None where no checkpoint is complete yet; raises `CheckpointDamaged`."""
        hint = f"{POINTER} of run {self.run_id} cannot be read; the checkpoints beside it may be intact"
        return self._sync_file(POINTER, Pointer.model_validate_json, hint)

    def promotion(self) -> Promotion | None:
        """What is promoted, if anything; raises `CheckpointDamaged` where the mark cannot be read."""
        hint = f"{PROMOTED} of run {self.run_id} cannot be read; promote a checkpoint anew, or clear the mark"
        return self._sync_file(PROMOTED, Promotion.model_validate_json, hint)

    def _sync_file(self, key: str, parse: Callable[[bytes], T], otherwise: str) -> T | None:
        try:
            return self.read_whole(key, parse)
        except ObjectMissing:
            return None
        except ValueError:
            raise CheckpointDamaged(otherwise) from None

    def read_whole(self, key: str, parse: Callable[[bytes], T]) -> T:
        """What `parse` makes of the object; raises `ObjectMissing`, and the `ValueError` of `parse` if it stays so.

        Some stores write in place (the embedded one does) and show an object that is empty or half there before it is
        whole. So what cannot be parsed is read again, for some 1.5 s.
        """
        for pause in _READ_PAUSES_SECONDS:
            with contextlib.suppress(ValueError):
                return parse(self.store.get(key))
            time.sleep(pause)
        return parse(self.store.get(key))

    def marked(self, mark: str) -> str | None:
        """The checkpoint that one of `MARKS` stands for, if any."""
        if mark == "promoted":
            promotion = self.promotion()
            return promotion.checkpoint if promotion else None
        pointer = self.pointer()
        return {"latest": pointer.latest, "best": pointer.best, "final": pointer.final}[mark] if pointer else None

    def resolve(self, name: str) -> str:
        """A checkpoint's name, from itself or from one of `MARKS`; raises `CheckpointNotFound` with those there are."""
        found, known = self.marked(name) if name in MARKS else name, self.names()
        if found in known:
            if name == "promoted":
                self._check_promoted(found)
            return found
        if not known:
            raise CheckpointNotFound(f"run {self.run_id} has no checkpoint yet")
        what = f"no checkpoint {name!r}" if found == name else f"no {name} checkpoint"
        gone = f" ({found} is gone)" if found not in (None, name) else ""
        marks = ", ".join(MARKS)
        raise CheckpointNotFound(f"run {self.run_id} has {what}{gone}; there are: {', '.join(known)}; or say {marks}")

    def _check_promoted(self, name: str) -> None:
        """What was promoted are those very bytes; raises `CheckpointDamaged` where they were replaced."""
        promotion, digest = self.promotion(), hashlib.sha256(self.read_manifest(name)[0]).hexdigest()
        if promotion is not None and promotion.checkpoint == name and promotion.manifest_sha256 != digest:
            raise CheckpointDamaged(f"the manifest of {name} is not the one that was promoted")

    def preferred(self) -> str:
        """What to deploy or to play when nothing is said: the promoted one, else the best, else the newest."""
        return self.resolve(next((mark for mark in ("promoted", "best") if self.marked(mark)), "latest"))

    def names(self) -> list[str]:
        """All checkpoint folders in the store, oldest version first, complete or not."""
        found = [name for name in self.store.folders(CHECKPOINTS) if checkpoint_version(name) is not None]
        return sorted(found, key=lambda name: (checkpoint_version(name) or 0, name))

    def manifest(self, name: str) -> Manifest:
        """The manifest of `name`; raises `CheckpointNotFound` or `CheckpointDamaged`."""
        return self.read_manifest(name)[1]

    def read_manifest(self, name: str, sha256: str | None = None) -> tuple[bytes, Manifest]:
        """The manifest of `name` and its bytes, whose hash the pointer holds: the one with that hash, else that of the
        upload that counts (`Manifest.rank`). One that was cut off, or is damaged, counts where there is no other."""
        found: list[tuple[bytes, Manifest]] = []
        problems: list[CheckpointDamaged] = []
        root = f"{CHECKPOINTS}{name}/"
        for folder in (*(f"{root}{upload}/" for upload in self.store.folders(root)), root):
            if folder == root and found:
                break  # else it may be of format 1, which has it there
            try:
                found.append(self._read_upload(name, folder))
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
        """What the pointer names, the manifest verified by the pointer's hash; None before the first checkpoint."""
        pointer = self.pointer()
        if pointer is None:
            return None
        return self._load(self.read_manifest(pointer.latest, pointer.manifest_sha256)[1], only)

    def load(self, name: str, only: str | tuple[str, ...] = "") -> Checkpoint:
        """The checkpoint `name`, every object verified; `only` restricts it to objects that end so."""
        return self._load(self.manifest(name), only)

    def _load(self, manifest: Manifest, only: str | tuple[str, ...]) -> Checkpoint:
        objects = {key: self.read_object(manifest, key) for key in manifest.objects if key.endswith(only)}
        return Checkpoint(manifest, objects)

    def read_object(self, manifest: Manifest, key: str) -> bytes:
        """One object of a checkpoint, verified; raises `CheckpointDamaged`."""
        name, wanted = manifest.name, manifest.objects[key]
        try:
            data = self.store.get(manifest.folder + key)
        except ObjectMissing:
            raise CheckpointDamaged(f"{name} lacks its object {key}") from None
        if len(data) != wanted.bytes:
            raise CheckpointDamaged(f"{name}/{key} was altered: {len(data)} bytes, the manifest says {wanted.bytes}")
        if hashlib.sha256(data).hexdigest() != wanted.sha256:
            raise CheckpointDamaged(f"{name}/{key} was altered: its SHA-256 is not the manifest's")
        return data

    def newest_good(self) -> tuple[Checkpoint, list[str]]:
        """The newest checkpoint that verifies, and a line for each newer one that does not.

        One beyond the pointer that an older trainer than the pointer's wrote came late: what it had learnt from may be
        in no log any more. Raises `CheckpointNotFound` where there is none, `CheckpointDamaged` where none can be used.
        """
        problems: list[str] = []
        epoch, newest = 0, 0
        with contextlib.suppress(CheckpointDamaged):  # the trainer makes it anew
            if pointer := self.pointer():
                epoch, newest = pointer.epoch, checkpoint_version(pointer.latest) or 0
        for name in reversed(self.names()):
            try:
                manifest = self.manifest(name)
                if manifest.epoch < epoch and manifest.version > newest:
                    problems.append(f"{name} came late, from a trainer (epoch {manifest.epoch}) that had been replaced")
                    continue
                return self._load(manifest, ""), problems
            except CheckpointNotFound:
                continue  # never completed: it was not a checkpoint yet
            except CheckpointDamaged as error:
                problems.append(str(error))
        if problems:
            raise CheckpointDamaged(f"no usable checkpoint in run {self.run_id}: " + "; ".join(problems))
        raise CheckpointNotFound(f"run {self.run_id} has no checkpoint yet")

    def delete(self, name: str) -> None:
        """Removes a checkpoint, manifests first, so that no reader takes the rest for whole."""
        folder = f"{CHECKPOINTS}{name}/"
        for upload in self.store.folders(folder):
            self.store.delete(f"{folder}{upload}/{MANIFEST}")
        for key in self.store.keys(folder):
            self.store.delete(key)


def describe_objects(objects: dict[str, bytes]) -> dict[str, StoredObject]:
    """Sizes and hashes for a manifest."""
    return {
        name: StoredObject(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in sorted(objects.items())
    }
