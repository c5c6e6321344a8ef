"""The writer, with a real Redis and a real folder: order, status, retention, fencing, and a store that fails."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stagecoach.shared.base import world
from stagecoach.shared.base.errors import CheckpointNotFound, Fenced, StoreError, WaitTimeout
from stagecoach.shared.experience.checkpoint_name import checkpoint_name, checkpoint_version
from stagecoach.shared.protocol.events import read_events, record_evaluation
from stagecoach.shared.protocol.experience_log import ExperienceLog
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.shared.storage.checkpoint_store import (
    CHECKPOINTS,
    MANIFEST,
    POINTER,
    PROMOTED,
    READY,
    STATUS,
    Checkpoint,
    CheckpointStore,
    Manifest,
    Pointer,
    Promotion,
    describe_objects,
)
from stagecoach.shared.storage.object_store import FileStore, ObjectStore
from stagecoach.trainer_node.checkpointing.checkpoint_writer import CheckpointWriter
from stagecoach.trainer_node.state.snapshot import Snapshot
from tests.conftest import MakeRole, minimal_config
from tests.support.processes.waiting import eventually
from tests.support.runs.checkpoints import key_of
from tests.support.suite.speed import stretched

PATIENCE = stretched(60.0)
NEWEST_ONLY = {"every": "1 updates", "keep_last": 1}
Before = Callable[[str, str], None]


class Watched:
    """A store that calls `before` ahead of every change, and notes those outside the metrics."""

    def __init__(self, store: ObjectStore, before: Before) -> None:
        self._store, self._before, self.changes = store, before, list[str]()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)

        def change(key: str, *args: Any) -> Any:
            self._before(name, key)
            if not key.startswith("metrics/"):
                self.changes.append(f"{name} {key}")
            return found(key, *args)

        return change if name in {"put", "delete"} else found


class Writing:
    """A run, and a running writer of a new epoch."""

    def __init__(self, role: RunContext) -> None:
        self.role, self.checkpoints, self.store = role, role.checkpoints, role.checkpoints.store
        self.writer = CheckpointWriter.start(role, (role.flow.take_over(), 0, 0, 0))

    def save(self, snapshot: Snapshot) -> None:
        self.writer.submit(snapshot)
        self.writer.wait_idle(PATIENCE)

    def publish(self, *versions: int) -> list[str]:
        """These versions, one after the other, each durable; returns the names."""
        snapshots = [snapshot_of(self.role, version) for version in versions]
        for snapshot in snapshots:
            self.save(snapshot)
        return [snapshot.name for snapshot in snapshots]

    def score(self, name: str, mean_return: float, confirmed: float | None = None) -> None:
        """By the evaluator; its second evaluation says the same, unless `confirmed` is given."""
        confirmation = {"mean_return": mean_return if confirmed is None else confirmed}
        scores = {"version": checkpoint_version(name), "mean_return": mean_return, "confirmation": confirmation}
        record_evaluation(self.role.redis, self.role.run_id, name, scores)

    def forget_scores(self) -> None:
        self.role.redis.delete(RunKeys(self.role.run_id).evaluations)

    def promote(self, name: str) -> None:
        """A person's mark."""
        digest = hashlib.sha256(self.checkpoints.read_manifest(name)[0]).hexdigest()
        self.checkpoints.write_promotion(Promotion(checkpoint=name, manifest_sha256=digest, time=1.0))

    def pointer(self) -> Pointer:
        found = self.checkpoints.pointer()
        assert found is not None
        return found

    def latest(self) -> Checkpoint:
        found = self.checkpoints.load_latest()
        assert found is not None
        return found

    def status_file(self) -> dict[str, Any]:
        found = self.checkpoints.marker(STATUS)
        assert found is not None
        return found

    def told(self) -> Any:
        """What the writer says about the store."""
        text: Any = self.role.redis.get(RunKeys(self.role.run_id).store_status)
        return json.loads(text)

    def written(self) -> dict[str, bytes]:
        return {key: self.store.get(key) for key in self.store.keys("")}


Start = Callable[..., Writing]


@pytest.fixture
def start(make_role: MakeRole) -> Iterator[Start]:
    """`start(checkpoint)` → the run with a new writer; `before` is called ahead of each change of its store."""
    running: list[Writing] = []

    def start(checkpoint: dict[str, Any] | None = None, before: Before = lambda word, key: None) -> Writing:
        role = make_role(minimal_config(**({"checkpoint": checkpoint} if checkpoint else {})))
        store = Watched(role.checkpoints.store, before)
        running.append(Writing(dataclasses.replace(role, checkpoints=CheckpointStore(store, role.run_id))))
        return running[-1]

    yield start
    for one in running:
        one.writer.close()


def snapshot_of(
    role: RunContext, version: int, position: str = "0-0", content: bytes = b"weights", epoch: int = 1
) -> Snapshot:
    objects = {"default/policy.safetensors": content + str(version).encode(), "trainer/state.json": b"{}"}
    train = {"env_steps": version * 64, "episodes": 0, "updates": version}
    manifest = Manifest(
        run_id=role.run_id, name=checkpoint_name(version, version * 64), version=version, epoch=epoch,
        created=1000.0 + version, log_position=position, parent=None, objects=describe_objects(objects),
        provenance={"counters": {"train": train}, "mean_return": float(version)},
    )  # fmt: skip
    return Snapshot(manifest.name, version, position, lambda: Checkpoint(manifest, objects))


def fill_log(role: RunContext) -> list[str]:
    """Two fragments in the log, committed by the trainer; returns their positions."""
    log = ExperienceLog(role.redis, role.run_id)
    for seq in range(2):
        assert log.push("worker-0", 0, seq, 0, 32, b"fragment") == "pushed"
    positions = [entry.id for entry in log.read("0-0", 10, 0.0)]
    role.redis.hset(RunKeys(role.run_id).flow, "committed_id", positions[-1])
    return positions


def test_checkpoint_writer_prunes_last_and_trims_before(start: Start, make_role: MakeRole) -> None:
    role, lengths = make_role(), list[int]()
    log, positions = ExperienceLog(role.redis, role.run_id), fill_log(role)
    here = start(NEWEST_ONLY, lambda word, key: lengths.append(len(log)))
    first, second = (snapshot_of(role, version, positions[0]) for version in (0, 1))
    changes = here.store.changes  # type: ignore[attr-defined]
    one, two = (its.checkpoint.manifest.folder for its in (first, second))
    here.publish(0)
    assert changes == [
        f"put {one}default/policy.safetensors", f"put {one}trainer/state.json", f"put {one}{MANIFEST}",
        f"put {POINTER}", f"put {STATUS}", f"put {READY}",
    ]  # fmt: skip
    changes.clear()
    here.save(second)
    assert changes == [
        f"put {two}default/policy.safetensors", f"put {two}trainer/state.json", f"put {two}{MANIFEST}",
        f"put {POINTER}", f"put {STATUS}",
        f"delete {one}{MANIFEST}", f"delete {one}default/policy.safetensors", f"delete {one}trainer/state.json",
    ]  # fmt: skip
    puts = len(lengths) - 3
    assert lengths == [2] * puts + [1] * 3, "the log is trimmed once all is written, and deletions come last"
    assert [entry.id for entry in log.read("0-0", 10, 0.0)] == positions[1:]
    assert role.flow.read().trimmed_id == positions[0]


def test_first_checkpoint_writes_ready_pointer_status_and_event(start: Start) -> None:
    here = start()
    role = here.role
    assert here.checkpoints.marker(READY) is None
    first, second, _ = here.publish(0, 2, 2)  # one that was due is the last one too
    assert here.checkpoints.marker(READY) == {"run_id": role.run_id, "checkpoint": first, "created": 1000.0}
    pointer = here.pointer()
    assert (pointer.latest, pointer.best, pointer.final, pointer.epoch) == (second, None, None, 1)
    manifest = here.store.get(key_of(here.checkpoints, second, MANIFEST))
    assert pointer.manifest_sha256 == hashlib.sha256(manifest).hexdigest()
    assert here.latest().objects == snapshot_of(role, 2).checkpoint.objects
    assert here.told() == {"durable": second}
    events = [event for event in read_events(role.redis, role.run_id) if event.kind == "checkpoint"]
    assert [event.data for event in events] == [{"name": first, "version": 0}, {"name": second, "version": 2}]


def test_metrics_are_stored_again_only_for_new_scores(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A score that arrives during the upload is recorded before retention could prune its checkpoint."""
    late: list[str] = []

    def before(word: str, key: str) -> None:
        if late and key.endswith(MANIFEST):
            here.score(late.pop(), 5.0)

    here = start(NEWEST_ONLY, before)
    store, stored = here.writer.recorder.store, list[str]()

    def counted() -> None:
        stored.append("")
        store()

    monkeypatch.setattr(here.writer.recorder, "store", counted)
    (first,) = here.publish(1)
    assert len(stored) == 1
    late.append(first)
    (second,) = here.publish(2)
    assert len(stored) == 3
    assert here.checkpoints.names() == [first, second] and here.pointer().best == first


def test_status_file_lists_kept_checkpoints(start: Start) -> None:
    here = start({"every": "1 updates", "keep_last": 2})
    _, best = here.publish(1, 2)
    here.score(best, 50.0)
    (name,) = here.publish(3)
    status = here.status_file()
    entries = {entry["name"]: entry for entry in status.pop("checkpoints")}
    assert status == {"run_id": here.role.run_id, "latest": name, "best": best, "final": None}
    assert list(entries) == here.checkpoints.names() == [best, name]
    manifest = here.store.get(key_of(here.checkpoints, name, MANIFEST))
    assert entries[name] == {
        "name": name, "version": 3, "env_steps": 192, "episodes": 0, "updates": 3,
        "created": 1003.0, "mean_return": 3.0, "evaluation": None, "replay_from": None,
        "bytes": snapshot_of(here.role, 3).checkpoint.manifest.total_bytes,
        "manifest_sha256": hashlib.sha256(manifest).hexdigest(),
    }  # fmt: skip
    expected = {"version": 2, "mean_return": 50.0, "confirmation": {"mean_return": 50.0}}
    assert entries[best]["evaluation"] == expected


@pytest.mark.parametrize("key", [STATUS, POINTER, READY])
def test_lost_or_damaged_sync_file_is_rewritten(start: Start, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagecoach.shared.storage.checkpoint_store._READ_PAUSES_SECONDS", ())
    here = start()
    names = here.publish(1)
    for version, content in enumerate((None, b"garbage", b"[]", b"{}", b'{"surprise": 1}'), start=2):
        here.store.delete(key)
        if content is not None:
            here.store.put(key, content)
        names += here.publish(version)
        assert [entry["name"] for entry in here.status_file()["checkpoints"]] == names[-4:]
        assert here.pointer().latest == names[-1]
        assert here.checkpoints.marker(READY) is not None


def test_pointer_names_new_manifest_of_checkpoint_that_lost_one(start: Start) -> None:
    here = start()
    (name,) = here.publish(1)
    here.store.delete(key_of(here.checkpoints, name, MANIFEST))
    here.save(snapshot_of(here.role, 1, epoch=2))
    assert here.latest().manifest.epoch == 2


def test_best_mark_moves_when_score_arrives_between_checkpoints(start: Start) -> None:
    here = start()
    one, two = here.publish(1, 2)
    for turn, name in enumerate((one, two, two)):
        here.score(name, 10.0 + turn)
        eventually(lambda name=name: here.pointer().best == here.told().get("best") == name)  # type: ignore[misc]
        assert here.pointer().latest == two


def test_best_is_ranked_by_second_evaluation(start: Start) -> None:
    here = start(NEWEST_ONLY)
    (held,) = here.publish(1)
    here.score(held, 80.0)
    (lucky,) = here.publish(2)
    here.score(lucky, 100.0, confirmed=20.0)
    (unconfirmed,) = here.publish(3)
    record_evaluation(here.role.redis, here.role.run_id, unconfirmed, {"version": 3, "mean_return": 500.0})
    (last,) = here.publish(4)
    assert here.checkpoints.marked("best") == held
    assert here.checkpoints.names() == [held, last]


def test_best_survives_new_writer_and_lost_scores(start: Start) -> None:
    first = start(NEWEST_ONLY)
    (best,) = first.publish(1)
    first.score(best, 100.0)
    first.publish(2, 3)
    first.writer.close()
    first.forget_scores()
    again = start(NEWEST_ONLY)
    (name,) = again.publish(4)
    again.score(name, 1.0)
    (latest,) = again.publish(5)
    assert again.checkpoints.names() == [best, latest]
    pointer = again.pointer()
    assert (pointer.best, pointer.latest, pointer.epoch) == (best, latest, 2)
    assert again.checkpoints.load(best).objects == snapshot_of(again.role, 1).checkpoint.objects


def test_best_stays_when_every_score_is_lost(start: Start) -> None:
    here = start(NEWEST_ONLY)
    (best,) = here.publish(1)
    here.score(best, 100.0)
    here.publish(2)
    here.forget_scores()
    here.store.put(STATUS, b"garbage")
    _, name = here.publish(3, 4)
    assert here.checkpoints.names() == [best, name] and here.checkpoints.marked("best") == best
    here.score(name, 1.0)
    (last,) = here.publish(5)
    assert here.checkpoints.marked("best") == name
    assert here.checkpoints.names() == [name, last]


def test_promoted_checkpoint_is_kept_until_withdrawn(start: Start) -> None:
    first = start(NEWEST_ONLY)
    (promoted,) = first.publish(1)
    first.promote(promoted)
    first.publish(2, 3)
    first.writer.close()
    here = start(NEWEST_ONLY)
    (last,) = here.publish(4)
    assert here.checkpoints.names() == [promoted, last]
    assert [entry["name"] for entry in here.status_file()["checkpoints"]] == [promoted, last]
    here.checkpoints.write_promotion(None)
    assert here.publish(5) == here.checkpoints.names()


def test_nothing_is_pruned_when_promotion_is_unreadable(start: Start) -> None:
    here = start(NEWEST_ONLY)
    names = here.publish(1)
    here.promote(names[0])
    here.store.put(PROMOTED, b"garbage")
    names += here.publish(2, 3)
    assert here.checkpoints.names() == names and here.checkpoints.marked("latest") == names[-1]
    here.checkpoints.write_promotion(None)
    assert here.publish(4) == here.checkpoints.names()


def test_manifest_names_newest_score_when_written(start: Start) -> None:
    here = start()

    def told(*versions: int) -> Any:
        return here.checkpoints.manifest(here.publish(*versions)[-1]).provenance["evaluation"]

    assert told(1, 2) is None
    here.score(checkpoint_name(2, 128), 7.0)
    here.score(checkpoint_name(1, 64), 9.0)
    expected = {"checkpoint": checkpoint_name(2, 128), "mean_return": 7.0, "episodes": None}
    assert told(3) == expected
    here.forget_scores()
    assert told(4) == expected, "the status file remembers"


def test_pruning_keeps_checkpoints_named_by_the_pointer(start: Start) -> None:
    deleted: list[tuple[str, set[str | None]]] = []

    def before(word: str, key: str) -> None:
        if word == "delete":
            pointer = here.pointer()
            name = key.removeprefix(CHECKPOINTS).partition("/")[0]
            deleted.append((name, {pointer.latest, pointer.best, pointer.final}))

    here = start(NEWEST_ONLY, before)
    for version in range(6):
        (name,) = here.publish(version)
        here.score(name, float(version % 3))
    pointer = here.writer.finish(name)
    assert pointer.final == name == pointer.latest
    assert len(deleted) > 6 and all(name not in named for name, named in deleted)
    for kept in {pointer.latest, pointer.best, pointer.final} - {None}:
        assert here.checkpoints.load(str(kept)).objects


def test_cut_off_uploads_are_ignored_and_deleted(start: Start) -> None:
    here = start({"every": "1 updates", "keep_last": 2})
    here.publish(1)
    for version in (2, 3, 9):
        here.store.put(f"{CHECKPOINTS}{checkpoint_name(version, 0)}/0/trainer/state.json", b"half")
    here.publish(4)
    assert here.checkpoints.names() == [checkpoint_name(1, 64), checkpoint_name(4, 256), checkpoint_name(9, 0)]
    with pytest.raises(CheckpointNotFound):
        here.checkpoints.manifest(checkpoint_name(9, 0))


def test_fenced_writer_writes_and_trims_nothing(start: Start) -> None:
    old = start()
    positions = fill_log(old.role)
    (name,) = old.publish(1)
    new = start()
    before, told = old.written(), old.told()
    with pytest.raises(Fenced, match="epoch 1 may not write checkpoints; a newer trainer has taken over"):
        old.save(snapshot_of(old.role, 2, positions[1]))
    assert isinstance(old.writer.failure, Fenced)
    with pytest.raises(Fenced):
        old.writer.finish(name)
    assert (old.written(), old.told()) == (before, told)
    assert len(ExperienceLog(old.role.redis, old.role.run_id)) == 2
    assert [name, *new.publish(2)] == new.checkpoints.names() and new.writer.failure is None


def test_late_manifest_matches_the_pointer(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first try is given up and carried out after the second; meanwhile there is news, such as a score."""
    here = start()
    late: list[tuple[str, bytes]] = []
    put = FileStore.put

    def slow(store: FileStore, key: str, data: bytes) -> None:
        if key.endswith(f"/{MANIFEST}") and not late:
            late.append((key, data))
            here.score(checkpoint_name(1, 64), 7.0)
            raise StoreError("timed out")
        put(store, key, data)

    monkeypatch.setattr(FileStore, "put", slow)
    (name,) = here.publish(1)
    here.store.put(*late[0])
    assert here.latest().manifest.name == name


def test_wait_for_a_checkpoint_ends_while_the_clock_stands_still(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does in a simulated run for the length of a step; a walk repeated the wait for ever (seed 4, 24 hours)."""

    def fails(word: str, key: str) -> None:
        raise StoreError("the store is away")

    here = start(before=fails)
    here.writer.submit(snapshot_of(here.role, 1))
    monkeypatch.setattr(world, "monotonic", lambda: 5.0)
    with pytest.raises(WaitTimeout, match="not durable after 0 s"):
        here.writer.wait_idle(0.0)


def test_writer_keeps_equal_upload_and_adds_other_contents(start: Start) -> None:
    first = start()
    names, role = first.publish(1, 2), first.role
    before = first.written()
    here = start()
    here.save(snapshot_of(role, 2, epoch=2))
    after = here.written()
    changed = {key for key in after if after[key] != before.get(key) and not key.startswith("metrics/")}
    assert changed == {POINTER}, "which the new epoch has signed"
    other, kept = snapshot_of(role, 2, content=b"other", epoch=2), snapshot_of(role, 2).checkpoint
    here.save(other)
    assert here.checkpoints.load(names[1]).objects == here.latest().objects == other.checkpoint.objects
    assert all(here.store.get(kept.manifest.folder + key) == kept.objects[key] for key in kept.objects)
