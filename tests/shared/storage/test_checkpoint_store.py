"""Checkpoints: written manifest last, read with every byte verified, and refused by name when anything is odd."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stagecoach.shared.base import world
from stagecoach.shared.base.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound
from stagecoach.shared.experience.checkpoint_name import checkpoint_name, checkpoint_version
from stagecoach.shared.storage.checkpoint_store import (
    CHECKPOINTS,
    FINISHED,
    MANIFEST,
    MARKS,
    POINTER,
    PROMOTED,
    Checkpoint,
    CheckpointStore,
    Manifest,
    Pointer,
)
from stagecoach.shared.storage.object_store import FileStore, ObjectStore
from stagecoach.trainer_node.checkpointing.retention import take_inventory
from tests.support.experience.strategies import JSON_VALUES
from tests.support.processes.waiting import Background
from tests.support.runs.checkpoints import manifest_of

RUN = "the-run"
POLICY, STATE = "default/policy.safetensors", "trainer/state.json"


def objects_of(version: int) -> dict[str, bytes]:
    """Some objects whose bytes say which checkpoint they belong to."""
    return {POLICY: f"policy {version} ".encode() * (200 + version), STATE: json.dumps({"version": version}).encode()}


def publish(checkpoints: CheckpointStore, version: int) -> str:
    """Objects, manifest, pointer; returns the name."""
    objects = objects_of(version)
    return point(checkpoints, version, checkpoints.write(manifest_of(version, objects), objects))


def point(checkpoints: CheckpointStore, version: int, manifest: bytes, epoch: int = 1) -> str:
    """Moves the pointer there; returns the name."""
    name, digest = checkpoint_name(version, version * 64), hashlib.sha256(manifest).hexdigest()
    checkpoints.write_pointer(Pointer(latest=name, epoch=epoch, manifest_sha256=digest))
    return name


def listing(store: ObjectStore) -> dict[str, bytes]:
    """Every key and its bytes."""
    return {key: store.get(key) for key in store.keys("")}


def at(name: str, key: str) -> str:
    """The key of an object of a checkpoint that `publish` has written."""
    version = checkpoint_version(name) or 0
    return manifest_of(version, objects_of(version)).folder + key


class Watched:
    """A store that notes what is asked of it, and asks `before` first, which may raise or return another answer."""

    def __init__(self, store: ObjectStore, before: Callable[[str, Callable[[], Any]], Any] = lambda _, call: call()):
        self._store, self._before = store, before
        self.calls: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not callable(found):
            return found

        def call(key: str = "", *args: Any, **options: Any) -> Any:
            self.calls.append((name, key))
            return self._before(name, lambda: found(key, *args, **options))

        return call


@pytest.fixture
def checkpoints(any_store: ObjectStore) -> CheckpointStore:
    return CheckpointStore(any_store, RUN)


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "sleep", lambda _: None)


# Writing


def test_manifest_is_written_last_and_deleted_first(any_store: ObjectStore) -> None:
    watched = Watched(any_store)
    checkpoints, objects = CheckpointStore(watched, RUN), objects_of(3)
    name = manifest_of(3, objects).name
    checkpoints.write(manifest_of(3, objects), objects)
    writes = [key for word, key in watched.calls if word == "put"]
    assert writes == [at(name, POLICY), at(name, STATE), at(name, MANIFEST)]
    verified = [watched.calls.index(("get", at(name, key))) for key in objects]
    assert max(watched.calls.index(("put", at(name, key))) for key in objects) < min(verified)
    assert max(verified) < watched.calls.index(("put", at(name, MANIFEST)))
    publish(checkpoints, 3)
    checkpoints.delete(name)
    assert next(key for word, key in watched.calls if word == "delete") == at(name, MANIFEST)
    assert checkpoints.names() == [] and any_store.keys(CHECKPOINTS) == []
    with pytest.raises(CheckpointNotFound, match=name):
        checkpoints.load_latest()


def test_manifest_is_not_written_when_store_alters_bytes(any_store: ObjectStore) -> None:
    forgetful = Watched(any_store, lambda word, call: call()[:-1] if word == "get" else call())
    with pytest.raises(CheckpointDamaged, match=r"policy\.safetensors: the store gave back other bytes"):
        CheckpointStore(forgetful, RUN).write(manifest_of(3, objects_of(3)), objects_of(3))
    assert not any(key.endswith(MANIFEST) for key in any_store.keys(""))
    assert CheckpointStore(any_store, RUN).pointer() is None


def test_checkpoint_round_trips(checkpoints: CheckpointStore) -> None:
    name = publish(checkpoints, 3)
    expected = Checkpoint(manifest_of(3, objects_of(3)), objects_of(3))
    assert checkpoints.load(name) == expected
    assert checkpoints.load_latest() == expected
    assert checkpoints.newest_good() == (expected, [])
    assert expected.manifest.total_bytes == sum(len(data) for data in objects_of(3).values())
    assert checkpoints.load(name, only="policy.safetensors").objects == {POLICY: objects_of(3)[POLICY]}


def test_newest_trainers_upload_counts_under_a_taken_name(checkpoints: CheckpointStore) -> None:
    name = publish(checkpoints, 3)
    before = listing(checkpoints.store)
    other = objects_of(3) | {STATE: b"{}"}
    checkpoints.write(manifest_of(3, other, epoch=0, created=9.0), other)
    assert checkpoints.load(name).objects == objects_of(3)
    checkpoints.write(manifest_of(3, other, epoch=2), other)
    assert checkpoints.load(name).objects == other
    latest = checkpoints.load_latest()
    assert latest is not None and latest.objects == objects_of(3)  # the very manifest that the pointer names
    assert before.items() < listing(checkpoints.store).items()


def test_late_upload_beyond_the_pointer_is_not_resumed_from(checkpoints: CheckpointStore) -> None:
    objects = objects_of(5)
    publish(checkpoints, 3)
    checkpoints.write(manifest_of(5, objects), objects)  # the same trainer's: it died before it moved the pointer
    assert checkpoints.newest_good()[0].manifest.version == 5
    written = checkpoints.write(manifest_of(4, objects_of(4), epoch=2), objects_of(4))
    point(checkpoints, 4, written, epoch=2)
    found, problems = checkpoints.newest_good()
    assert found.manifest.version == 4
    assert problems == ["5_Step-320.ckpt came late, from a trainer (epoch 1) that had been replaced"]
    point(checkpoints, 3, written)
    assert checkpoints.newest_good()[0].manifest.version == 5


def test_rewritten_checkpoint_keeps_manifest_and_repairs_damage(checkpoints: CheckpointStore) -> None:
    name, objects = publish(checkpoints, 3), objects_of(3)
    before = listing(checkpoints.store)
    again = checkpoints.write(manifest_of(3, objects, epoch=2, created=9.0), objects)
    assert again == before[at(name, MANIFEST)] and listing(checkpoints.store) == before
    checkpoints.store.delete(at(name, POLICY))
    checkpoints.store.put(at(name, STATE), b"altered")
    checkpoints.write(manifest_of(3, objects), objects)
    assert checkpoints.load(name).objects == objects


def test_half_upload_is_invisible_and_can_be_completed(checkpoints: CheckpointStore) -> None:
    name, half = publish(checkpoints, 1), checkpoint_name(2, 128)
    checkpoints.store.put(at(half, POLICY), objects_of(2)[POLICY][:100])
    assert checkpoints.newest_good() == (checkpoints.load_latest(), [])
    assert checkpoints.newest_good()[0].manifest.name == name
    with pytest.raises(CheckpointNotFound, match=f"no \\(complete\\) checkpoint {half}"):
        checkpoints.load(half)
    publish(checkpoints, 2)
    assert checkpoints.newest_good()[0].manifest.name == half


def test_newest_good_is_found_though_what_was_listed_is_pruned(
    checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(checkpoints, 1)
    listed = checkpoints.names

    def names() -> list[str]:
        found = listed()
        if len(found) == 1 and found[0] == checkpoint_name(1, 64):
            publish(checkpoints, 2)
            checkpoints.delete(found[0])
        return found

    monkeypatch.setattr(checkpoints, "names", names)
    assert checkpoints.newest_good()[0].manifest.version == 2


class CutOff(Exception):
    pass


class Stalling(Watched):
    """A store whose `at`-th change is not carried out, until `late`; nothing comes after it."""

    def __init__(self, store: ObjectStore, at: int) -> None:
        super().__init__(store, self._stall)
        self._left = at
        self.late: Callable[[], Any] = lambda: None

    def _stall(self, word: str, call: Callable[[], Any]) -> Any:
        if word in {"put", "delete"}:
            self._left -= 1
            if self._left < 0:
                self.late = call
                raise CutOff
        return call()


@pytest.mark.parametrize("same", [True, False], ids=["the same contents", "other contents"])
@pytest.mark.parametrize("what", ["upload", "upload over one that was cut off", "prune"])
def test_late_requests_of_replaced_trainer_touch_no_newer_upload(any_store: ObjectStore, what: str, same: bool) -> None:
    """Each that it may have been in the middle of is carried out once its successor has come to the same version."""
    checkpoints = CheckpointStore(any_store, RUN)
    for change in itertools.count(1 if what == "prune" and same else 0):  # what is whole its successor takes over
        objects = objects_of(change)
        manifest, newer = manifest_of(change, objects), objects if same else objects | {STATE: b"by other experience"}
        stalling = Stalling(any_store, change)
        if what == "prune":
            checkpoints.write(manifest, objects)
        elif what != "upload":
            with contextlib.suppress(CutOff):
                CheckpointStore(Stalling(any_store, 2), RUN).write(manifest, objects)
            manifest = manifest_of(change, objects, created=2.0)
        try:
            old = CheckpointStore(stalling, RUN)
            old.delete(manifest.name) if what == "prune" else old.write(manifest, objects)
        except CutOff:
            written = checkpoints.write(manifest_of(change, newer, epoch=2, created=9.0), newer)
            point(checkpoints, change, written, epoch=2)
            stalling.late()
        else:
            assert change >= 3  # each of its requests was late once
            return
        assert checkpoints.load(manifest.name).objects == newer
        assert checkpoints.load_latest() == checkpoints.load(manifest.name) == checkpoints.newest_good()[0]


def test_names_sort_by_version_and_skip_other_folders(checkpoints: CheckpointStore) -> None:
    for version in (10, 9, 100):
        publish(checkpoints, version)
    others = ["12", "12_Step-24576", "x_Step-1.ckpt", "1_Step-.ckpt", "a1_Step-1.ckpt", ".partial-1"]
    for name in others:
        checkpoints.store.put(f"{CHECKPOINTS}{name}/readme.txt", b"hello")
    assert checkpoints.names() == ["9_Step-576.ckpt", "10_Step-640.ckpt", "100_Step-6400.ckpt"]
    assert [checkpoint_version(name) for name in (*checkpoints.names(), *others, "")] == [9, 10, 100, *[None] * 7]


# Reading what is not as it should be


def alter(field: str, value: Any) -> Callable[[bytes], bytes]:
    """A manifest with one field changed."""
    return lambda data: json.dumps(json.loads(data) | {field: value}).encode()


def renamed(name: str) -> Callable[[bytes], bytes]:
    """A manifest that names one of its objects so."""
    return lambda data: data.replace(json.dumps(POLICY).encode(), json.dumps(name).encode(), 1)


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes | None], str]] = {
    "tampered object": (POLICY, lambda data: data[:-1] + b"?", "was altered: its SHA-256 is not the manifest's"),
    "truncated object": (POLICY, lambda data: data[: len(data) // 2], "was altered"),
    "empty object": (STATE, lambda _: b"", "was altered"),
    "missing object": (STATE, lambda _: None, f"lacks its object {STATE}"),
    "foreign run": (MANIFEST, alter("run_id", "another"), "of run another, not to run the-run"),
    "another name": (MANIFEST, alter("name", "9_Step-9.ckpt"), "belongs to 9_Step-9.ckpt"),
    "newer format": (MANIFEST, alter("format", 2), "has format 2; this version of Stagecoach reads format 1"),
    "no format": (MANIFEST, alter("format", None), "has format None"),
    "unknown field": (MANIFEST, alter("surprise", 1), "the manifest of .* cannot be read"),
    "garbage manifest": (MANIFEST, lambda _: b"\x00\xff{", "the manifest of .* cannot be read"),
    "object above the checkpoint": (MANIFEST, renamed("../../../etc/passwd"), "is not the name of an object"),
    "object outside": (MANIFEST, renamed("/etc/passwd"), "is not the name of an object within a checkpoint"),
    "object with NUL": (MANIFEST, renamed("default/\0"), r"'default/.x00' is not the name of an object"),
    "object with a backslash": (MANIFEST, renamed("..\\policy"), "is not the name of an object within a checkpoint"),
    "object without a name": (MANIFEST, renamed("default//policy"), "is not the name of an object within a checkpoint"),
    "another time": (MANIFEST, alter("created", 2.0), "the manifest of .* was altered: it is not that of"),
    "time of no clock": (MANIFEST, alter("created", 1e300), "cannot be read: .* created"),
    "provenance of another kind": (MANIFEST, alter("provenance", [1]), "cannot be read: .* provenance"),
    "endless nesting": (MANIFEST, lambda _: b"[" * 100_000, "the manifest of .* cannot be read"),
    "manifest that is a list": (MANIFEST, lambda _: b"[1]", "the manifest of .* cannot be read"),
}


@pytest.mark.usefixtures("no_pauses")
def test_damage_is_named_and_previous_checkpoint_is_used(checkpoints: CheckpointStore) -> None:
    publish(checkpoints, 1)
    name = publish(checkpoints, 2)
    for damage, (key, change, message) in DAMAGES.items():
        intact = checkpoints.store.get(at(name, key))
        changed = change(intact)
        checkpoints.store.delete(at(name, key))
        if changed is not None:
            checkpoints.store.put(at(name, key), changed)
        before = listing(checkpoints.store)
        with pytest.raises(CheckpointDamaged, match=message):
            checkpoints.load(name)
        with pytest.raises(CheckpointDamaged):
            checkpoints.load_latest()
        good, problems = checkpoints.newest_good()
        assert good.manifest.version == 1 and good.objects == objects_of(1), damage
        assert len(problems) == 1 and name in problems[0], damage
        assert listing(checkpoints.store) == before, damage
        checkpoints.store.put(at(name, key), intact)


def test_missing_and_unreadable_checkpoints_raise_differently(checkpoints: CheckpointStore) -> None:
    assert checkpoints.load_latest() is None
    with pytest.raises(CheckpointNotFound, match="run the-run has no checkpoint yet"):
        checkpoints.newest_good()
    names = [publish(checkpoints, 1), publish(checkpoints, 2)]
    for name in names:
        checkpoints.store.put(at(name, STATE), b"altered")
    with pytest.raises(CheckpointDamaged, match="no usable checkpoint in run the-run") as caught:
        checkpoints.newest_good()
    assert all(name in str(caught.value) for name in names)
    assert not isinstance(caught.value, CheckpointNotFound)


def test_pointer_hash_detects_replaced_manifest(checkpoints: CheckpointStore) -> None:
    name = publish(checkpoints, 1)
    checkpoints.store.put(at(name, MANIFEST), checkpoints.store.get(at(name, MANIFEST)) + b" ")
    with pytest.raises(CheckpointDamaged, match="is not the one that the pointer names"):
        checkpoints.load_latest()


@pytest.mark.usefixtures("no_pauses")
def test_unreadable_sync_file_is_named_and_checkpoints_load(checkpoints: CheckpointStore) -> None:
    publish(checkpoints, 1)
    assert checkpoints.marker(".ready") is None
    content = {"checkpoint": "x", "n": 1, "what an environment raised": "\udce9"}
    checkpoints.write_marker(".ready", content)
    assert checkpoints.marker(".ready") == content
    reads: dict[str, tuple[Callable[[], Any], str]] = {
        ".ready": (lambda: checkpoints.marker(".ready"), r"\.ready of run the-run is not a JSON object"),
        PROMOTED: (checkpoints.preferred, r"\.promoted of run the-run cannot be read; promote a checkpoint"),
        POINTER: (checkpoints.load_latest, r"\.checkpoint of run the-run cannot be read; .* may be intact"),
    }
    for key, (read, said) in reads.items():
        for damaged in (b"", b"\xff\xfe", b"{", b"[]", b'{"latest": "1_Step-64.ckpt"}')[: 4 if key == ".ready" else 5]:
            checkpoints.store.put(key, damaged)
            before = listing(checkpoints.store)
            with pytest.raises(CheckpointDamaged, match=said):
                read()
            assert checkpoints.newest_good()[0].manifest.version == 1
            assert listing(checkpoints.store) == before
            assert key == POINTER or checkpoints.resolve("latest")


# Names


def promote(checkpoints: CheckpointStore, name: str) -> None:
    """The mark that a person sets."""
    digest = hashlib.sha256(checkpoints.read_manifest(name)[0]).hexdigest()
    checkpoints.write_marker(PROMOTED, {"checkpoint": name, "manifest_sha256": digest, "time": 1.0})


def test_names_and_marks_resolve_to_names(checkpoints: CheckpointStore) -> None:
    names = [publish(checkpoints, version) for version in (1, 2, 3)]
    pointer = checkpoints.pointer()
    assert pointer
    checkpoints.write_pointer(pointer.model_copy(update={"best": names[1], "final": names[2]}))
    assert checkpoints.preferred() == names[1]
    promote(checkpoints, names[0])
    wanted = dict(zip(("latest", "best", "final", "promoted"), (names[2], names[1], names[2], names[0]), strict=True))
    assert {mark: checkpoints.resolve(mark) for mark in (*MARKS, *names)} == wanted | {name: name for name in names}
    assert checkpoints.preferred() == names[0]


def test_unknown_name_or_mark_lists_checkpoints(checkpoints: CheckpointStore) -> None:
    for name in (*MARKS, "1_Step-64.ckpt"):
        with pytest.raises(CheckpointNotFound, match="run the-run has no checkpoint yet"):
            checkpoints.resolve(name)
    first, second = publish(checkpoints, 1), publish(checkpoints, 2)
    assert checkpoints.preferred() == second, "neither promoted nor played"
    there = f"there are: {first}, {second}; or say latest, best, final, promoted"
    for name, said in {
        "promoted": "no promoted checkpoint;", "best": "no best checkpoint;", "": "no checkpoint '';",
        "Best": "no checkpoint 'Best';", "../1_Step-64.ckpt": "no checkpoint '../1_Step-64.ckpt';",
    }.items():  # fmt: skip
        with pytest.raises(CheckpointNotFound) as caught:
            checkpoints.resolve(name)
        assert f"run the-run has {said} {there}" in str(caught.value)
    promote(checkpoints, first)
    checkpoints.delete(first)
    for mark in (None, "promoted"):
        with pytest.raises(CheckpointNotFound, match=rf"no promoted checkpoint \({first} is gone\); .*: {second};"):
            checkpoints.preferred(mark)


# Reading while it is being written


def test_half_written_object_is_read_again(checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    name = publish(checkpoints, 1)
    promote(checkpoints, name)
    checkpoints.write_marker(FINISHED, {"final": name})
    reads: dict[str, Callable[[], Any]] = {
        FINISHED: lambda: checkpoints.marker(FINISHED),
        POINTER: checkpoints.pointer,
        PROMOTED: checkpoints.promotion,
        at(name, MANIFEST): lambda: checkpoints.manifest(name),
    }
    for key, read in reads.items():
        wanted, whole = read(), checkpoints.store.get(key)
        for half in (b"", whole[: len(whole) // 2]):
            checkpoints.store.put(key, half)
            with monkeypatch.context() as patch:
                patch.setattr(world, "sleep", lambda _, key=key, whole=whole: checkpoints.store.put(key, whole))
                assert read() == wanted


def load_within(checkpoints: CheckpointStore, tries: int) -> Checkpoint:
    """The newest checkpoint, whole; only what was pruned while it was read is tried again."""
    for left in reversed(range(tries)):
        try:
            found = checkpoints.load_latest()
            assert found is not None and found.objects == objects_of(found.manifest.version)
            return found
        except CheckpointError as error:
            if not left or not (isinstance(error, CheckpointNotFound) or "lacks its object" in str(error)):
                raise
    raise AssertionError("unreachable")


def test_reader_never_sees_half_a_checkpoint(any_store: ObjectStore) -> None:
    writer, enough, seen = CheckpointStore(any_store, RUN), threading.Event(), list[int]()
    kept = [publish(writer, 0)]

    def write() -> None:
        for version in range(1, 1000):
            kept.append(publish(writer, version))
            while len(kept) > 2:
                writer.delete(kept.pop(0))
            assert load_within(writer, tries=3).manifest.version == version
            if version >= 25 and enough.is_set():
                return

    writing = Background(write)
    try:
        while writing.runs:
            seen.append(load_within(CheckpointStore(any_store, RUN), tries=10).manifest.version)
            if len(set(seen)) >= 10:
                enough.set()
    finally:
        enough.set()
    writing.result()
    assert seen == sorted(seen)
    assert len(set(seen)) >= 10 or checkpoint_version(kept[-1]) == 999


FIELDS = st.sampled_from([*Manifest.model_fields])


@given(
    damage=st.binary() | JSON_VALUES.map(json.dumps).map(str.encode) | st.dictionaries(FIELDS, JSON_VALUES),
    objects=st.none()
    | st.dictionaries(st.text() | st.sampled_from(["..", "a/..", "/a", "\0"]), JSON_VALUES, max_size=3),
)
@settings(
    max_examples=150, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
def test_arbitrary_manifest_is_damage_or_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any, objects: Any
) -> None:
    """Bytes, JSON, and a manifest of which some fields are something else: nothing but a named error ever comes."""
    monkeypatch.setattr(world, "sleep", lambda _: None)
    (tmp_path / "store").mkdir(exist_ok=True)
    store = FileStore(tmp_path / "store", RUN)
    intact = manifest_of(1, objects_of(1))
    if isinstance(damage, dict):
        content = json.loads(intact.model_dump_json()) | damage | ({} if objects is None else {"objects": objects})
        damage = json.dumps(content).encode()
    store.put(at(intact.name, MANIFEST), damage)
    checkpoints = CheckpointStore(store, RUN)
    try:
        checkpoints.load(intact.name)
    except CheckpointDamaged as error:
        str(error).encode()
    with contextlib.suppress(CheckpointDamaged):
        take_inventory(checkpoints, {})
    store.put(POINTER, damage)
    store.put(PROMOTED, damage)
    for mark in MARKS:
        with contextlib.suppress(CheckpointError):
            checkpoints.load(checkpoints.resolve(mark))
