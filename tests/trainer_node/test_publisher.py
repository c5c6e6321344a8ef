"""The publisher, with a real Redis and a real folder: order, status, retention, fencing, and a store that fails."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shared.checkpoint import (
    CHECKPOINTS,
    ENVIRONMENT,
    MANIFEST,
    POINTER,
    PROMOTED,
    READY,
    STATUS,
    CheckpointStore,
    Manifest,
    Promotion,
    checkpoint_name,
    describe_objects,
)
from shared.errors import CheckpointNotFound, Fenced, StoreError, WaitTimeout
from shared.events import read_events, record_evaluation
from shared.experience_log import ExperienceLog
from shared.object_store import ObjectStore
from shared.redis_keys import RunKeys
from shared.role import Role
from tests.conftest import MakeRole, minimal_config
from tests.support.checkpoints import key_of
from tests.support.speed import stretched
from trainer_node.publisher import Publisher
from trainer_node.snapshot import Snapshot

PATIENCE = stretched(60.0)
StartPublisher = Callable[..., Publisher]


@pytest.fixture
def start_publisher() -> Iterator[StartPublisher]:
    """`start_publisher(role)` → a running publisher of a new epoch; closed at the end."""
    running: list[Publisher] = []

    def start(role: Role, epoch: int | None = None) -> Publisher:
        publisher = Publisher(role, role.flow.take_over() if epoch is None else epoch)
        publisher.start()
        running.append(publisher)
        return publisher

    yield start
    for publisher in running:
        publisher.close()


def snapshot_of(
    role: Role, version: int, position: str = "0-0", content: bytes = b"weights", epoch: int = 1
) -> Snapshot:
    """A small snapshot as the trainer takes it."""
    objects = {"default/policy.safetensors": content + str(version).encode(), "trainer/state.json": b"{}"}
    train = {"env_steps": version * 64, "episodes": 0, "updates": version}
    manifest = Manifest(
        run_id=role.run_id, name=checkpoint_name(version, version * 64), version=version, epoch=epoch,
        created=1000.0 + version, log_position=position, parent=None, objects=describe_objects(objects),
        provenance={"counters": {"train": train}, "mean_return": float(version)},
    )  # fmt: skip
    return Snapshot.of(manifest, objects)


def publish(publisher: Publisher, role: Role, *versions: int) -> list[str]:
    """These versions, one after the other, each durable; answers the names."""
    snapshots = [snapshot_of(role, version) for version in versions]
    for snapshot in snapshots:
        publisher.submit(snapshot)
        publisher.wait_idle(PATIENCE)
    return [snapshot.manifest.name for snapshot in snapshots]


def score(role: Role, name: str, mean_return: float, confirmed: float | None = None) -> None:
    """What the evaluator says about a checkpoint; its second evaluation says the same, unless `confirmed` is given."""
    version = int(name.partition("_")[0])
    confirmation = {"mean_return": mean_return if confirmed is None else confirmed}
    scores = {"version": version, "mean_return": mean_return, "confirmation": confirmation}
    record_evaluation(role.redis, role.run_id, name, scores)


def fill_log(role: Role) -> list[str]:
    """Two fragments in the log, settled by the trainer; answers their positions."""
    log = ExperienceLog(role.redis, role.run_id)
    for seq in range(2):
        assert log.push("worker-0", 0, seq, 0, 32, b"fragment") == "pushed"
    positions = [entry.id for entry in log.read("0-0", 10, 0.0)]
    role.redis.hset(RunKeys(role.run_id).flow, "settled_id", positions[-1])
    return positions


def written(role: Role) -> dict[str, bytes]:
    """All objects of the run in the store."""
    store = role.checkpoints.store
    return {key: store.get(key) for key in store.keys("")}


def store_status(role: Role) -> dict[str, Any]:
    """What the publisher says about the store."""
    text = role.redis.get(RunKeys(role.run_id).store_status)
    return dict(json.loads(text)) if isinstance(text, bytes) else {}


def eventually(done: Callable[[], bool]) -> None:
    """Waits for what the background thread will do."""
    deadline = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


class Watched:
    """A store that notes every change, and calls `before` ahead of it."""

    def __init__(self, store: ObjectStore, before: Callable[[str, str], None] = lambda word, key: None) -> None:
        self._store = store
        self._before = before
        self.changes: list[str] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name not in {"put", "delete"}:
            return found

        def change(key: str, *args: Any, **options: Any) -> Any:
            self._before(name, key)
            self.changes.append(f"{name} {key}")
            return found(key, *args, **options)

        return change


def watched(role: Role, before: Callable[[str, str], None] = lambda word, key: None) -> tuple[Role, Watched]:
    """The role with a watched store."""
    store = Watched(role.checkpoints.store, before)
    return dataclasses.replace(role, checkpoints=CheckpointStore(store, role.run_id)), store


def test_the_order_is_objects_manifest_pointer_status_prune_and_trim_last(
    make_role: MakeRole, start_publisher: StartPublisher
) -> None:
    base = make_role(minimal_config(checkpoint={"every": "1 updates", "keep_last": 1}))
    log, lengths = ExperienceLog(base.redis, base.run_id), []
    role, store = watched(base, lambda word, key: lengths.append(len(log)))
    positions = fill_log(role)
    publisher = start_publisher(role)
    publish(publisher, role, 0)
    first, second = (snapshot_of(role, version, positions[0]).manifest.folder for version in (0, 1))
    assert store.changes == [
        f"put {first}default/policy.safetensors", f"put {first}trainer/state.json", f"put {first}{MANIFEST}",
        f"put {POINTER}", f"put {STATUS}", f"put {READY}",
    ]  # fmt: skip
    store.changes.clear()
    publisher.submit(snapshot_of(role, 1, positions[0]))
    publisher.wait_idle(PATIENCE)
    assert store.changes == [
        f"put {second}default/policy.safetensors", f"put {second}trainer/state.json", f"put {second}{MANIFEST}",
        f"put {POINTER}", f"put {STATUS}",
        f"delete {first}{MANIFEST}", f"delete {first}default/policy.safetensors", f"delete {first}trainer/state.json",
    ]  # fmt: skip
    assert set(lengths) == {2}, "the log was whole while anything was written"
    assert [entry.id for entry in log.read("0-0", 10, 0.0)] == positions[1:]
    assert role.flow.read().trimmed_id == positions[0]


def test_after_the_first_checkpoint_ready_pointer_status_and_event_say_so(
    make_role: MakeRole, start_publisher: StartPublisher
) -> None:
    role = make_role()
    publisher = start_publisher(role)
    assert role.checkpoints.marker(READY) is None
    first, second = publish(publisher, role, 0, 2)
    assert role.checkpoints.marker(READY) == {"run_id": role.run_id, "checkpoint": first, "created": 1000.0}
    pointer = role.checkpoints.pointer()
    assert pointer is not None
    assert (pointer.latest, pointer.best, pointer.final, pointer.epoch) == (second, None, None, 1)
    manifest = role.checkpoints.store.get(key_of(role.checkpoints, second, MANIFEST))
    assert pointer.manifest_sha256 == hashlib.sha256(manifest).hexdigest()
    latest = role.checkpoints.load_latest()
    assert latest is not None and latest.objects == snapshot_of(role, 2).objects
    assert store_status(role) == {"durable": second}
    events = [event for event in read_events(role.redis, role.run_id) if event.kind == "checkpoint"]
    assert [event.data for event in events] == [{"name": first, "version": 0}, {"name": second, "version": 2}]


def test_the_status_file_lists_what_is_kept_with_steps_returns_scores_and_sizes(
    make_role: MakeRole, start_publisher: StartPublisher
) -> None:
    role = make_role(minimal_config(checkpoint={"every": "1 updates", "keep_last": 2}))
    publisher = start_publisher(role)
    publish(publisher, role, 1, 2)
    score(role, checkpoint_name(2, 128), 50.0)
    names = publish(publisher, role, 3)
    status = role.checkpoints.marker(STATUS)
    assert status is not None
    entries = {entry["name"]: entry for entry in status.pop("checkpoints")}
    assert status == {"run_id": role.run_id, "latest": names[0], "best": checkpoint_name(2, 128), "final": None}
    assert list(entries) == role.checkpoints.names() == [checkpoint_name(2, 128), names[0]]
    manifest = role.checkpoints.store.get(key_of(role.checkpoints, names[0], MANIFEST))
    assert entries[names[0]] == {
        "name": names[0], "version": 3, "env_steps": 192, "episodes": 0, "updates": 3,
        "created": 1003.0, "mean_return": 3.0, "evaluation": None, "memory_from": None,
        "bytes": snapshot_of(role, 3).manifest.total_bytes, "manifest_sha256": hashlib.sha256(manifest).hexdigest(),
    }  # fmt: skip
    expected = {"version": 2, "mean_return": 50.0, "confirmation": {"mean_return": 50.0}}
    assert entries[checkpoint_name(2, 128)]["evaluation"] == expected


@pytest.mark.parametrize("key", [STATUS, POINTER, READY])
def test_a_sync_file_that_is_lost_or_damaged_is_made_anew(
    make_role: MakeRole, start_publisher: StartPublisher, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.checkpoint._READ_PAUSES_SECONDS", ())
    role = make_role()
    publisher = start_publisher(role)
    names = publish(publisher, role, 1)
    for version, content in enumerate((None, b"garbage", b"[]", b"{}", b'{"surprise": 1}'), start=2):
        role.checkpoints.store.delete(key)
        if content is not None:
            role.checkpoints.store.put(key, content)
        names += publish(publisher, role, version)
        status, pointer = role.checkpoints.marker(STATUS), role.checkpoints.pointer()
        assert status is not None and [entry["name"] for entry in status["checkpoints"]] == names[-4:]
        assert pointer is not None and pointer.latest == names[-1]
        assert role.checkpoints.marker(READY) is not None


def test_a_checkpoint_that_lost_its_manifest_is_pointed_to_by_its_new_one(
    make_role: MakeRole, start_publisher: StartPublisher
) -> None:
    role = make_role()
    publisher = start_publisher(role)
    (name,) = publish(publisher, role, 1)
    role.checkpoints.store.delete(key_of(role.checkpoints, name, MANIFEST))
    publisher.submit(snapshot_of(role, 1, epoch=2))
    publisher.wait_idle(PATIENCE)
    latest = role.checkpoints.load_latest()
    assert latest is not None and latest.manifest.epoch == 2


def test_the_last_the_best_and_every_mth_are_kept(make_role: MakeRole, start_publisher: StartPublisher) -> None:
    checkpoint = {"every": "1 updates", "keep_last": 2, "keep_best": 2, "keep_every": 5}
    role = make_role(minimal_config(checkpoint=checkpoint))
    publisher = start_publisher(role)
    for version in range(1, 10):
        (name,) = publish(publisher, role, version)
        score(role, name, {2: 90.0, 3: 80.0}.get(version, 1.0))
    publish(publisher, role, 11)
    assert [int(name.partition("_")[0]) for name in role.checkpoints.names()] == [2, 3, 5, 9, 11]


def test_a_score_that_arrives_while_nothing_is_published_moves_the_best(
    make_role: MakeRole, start_publisher: StartPublisher
) -> None:
    role = make_role()
    publisher = start_publisher(role)
    names = publish(publisher, role, 1, 2)

    def best() -> str | None:
        pointer = role.checkpoints.pointer()
        assert pointer is not None and pointer.latest == names[1]
        return pointer.best

    for turn, name in enumerate((names[0], names[1], names[1])):
        score(role, name, 10.0 + turn)
        eventually(lambda name=name: best() == name)  # type: ignore[misc]


def test_the_best_is_ranked_by_its_second_evaluation_and_is_none_without_one(
    make_role: MakeRole, start_publisher: StartPublisher
) -> None:
    role = make_role(minimal_config(checkpoint={"every": "1 updates", "keep_last": 1}))
    publisher = start_publisher(role)
    (held,) = publish(publisher, role, 1)
    score(role, held, 80.0)
    (lucky,) = publish(publisher, role, 2)
    score(role, lucky, 100.0, confirmed=20.0)
    (unconfirmed,) = publish(publisher, role, 3)
    record_evaluation(role.redis, role.run_id, unconfirmed, {"version": 3, "mean_return": 500.0})
    publish(publisher, role, 4)
    assert role.checkpoints.marked("best") == held
    assert role.checkpoints.names() == [held, checkpoint_name(4, 256)]


def test_the_best_survives_pruning_a_new_publisher_and_a_redis_that_forgot_the_scores(
    make_role: MakeRole, start_publisher: StartPublisher
) -> None:
    config = minimal_config(checkpoint={"every": "1 updates", "keep_last": 1})
    role = make_role(config)
    publisher = start_publisher(role)
    (best,) = publish(publisher, role, 1)
    score(role, best, 100.0)
    publish(publisher, role, 2, 3)
    publisher.close()
    role.redis.delete(RunKeys(role.run_id).evaluations)
    again = make_role(config)
    successor = start_publisher(again)
    latest = publish(successor, again, 4, 5)[1]
    assert again.checkpoints.names() == [best, latest]
    pointer = again.checkpoints.pointer()
    assert pointer is not None and (pointer.best, pointer.latest, pointer.epoch) == (best, latest, 2)
    assert again.checkpoints.load(best).objects == snapshot_of(role, 1).objects


def test_the_best_stays_the_best_where_every_score_is_lost_until_there_are_new_ones(
    make_role: MakeRole, start_publisher: StartPublisher
) -> None:
    role = make_role(minimal_config(checkpoint={"every": "1 updates", "keep_last": 1}))
    publisher = start_publisher(role)
    (best,) = publish(publisher, role, 1)
    score(role, best, 100.0)
    publish(publisher, role, 2)
    role.redis.delete(RunKeys(role.run_id).evaluations)
    role.checkpoints.store.put(STATUS, b"garbage")
    names = publish(publisher, role, 3, 4)
    assert role.checkpoints.names() == [best, names[1]] and role.checkpoints.marked("best") == best
    score(role, names[1], 1.0)
    (last,) = publish(publisher, role, 5)
    assert role.checkpoints.marked("best") == names[1]
    assert role.checkpoints.names() == [names[1], last]


def promote(role: Role, name: str) -> None:
    """A person's mark."""
    digest = hashlib.sha256(role.checkpoints.read_manifest(name)[0]).hexdigest()
    role.checkpoints.write_promotion(Promotion(checkpoint=name, manifest_sha256=digest, time=1.0))


def test_what_is_promoted_is_kept_by_any_trainer_and_goes_once_it_is_not(
    make_role: MakeRole, start_publisher: StartPublisher
) -> None:
    config = minimal_config(checkpoint={"every": "1 updates", "keep_last": 1})
    role = make_role(config)
    publisher = start_publisher(role)
    (promoted,) = publish(publisher, role, 1)
    promote(role, promoted)
    publish(publisher, role, 2, 3)
    publisher.close()
    successor = start_publisher(make_role(config))
    (last,) = publish(successor, role, 4)
    assert role.checkpoints.names() == [promoted, last]
    status = role.checkpoints.marker(STATUS)
    assert status is not None and [entry["name"] for entry in status["checkpoints"]] == [promoted, last]
    role.checkpoints.write_promotion(None)
    (last,) = publish(successor, role, 5)
    assert role.checkpoints.names() == [last]


def test_nothing_is_pruned_while_nobody_knows_what_is_promoted(
    make_role: MakeRole, start_publisher: StartPublisher
) -> None:
    role = make_role(minimal_config(checkpoint={"every": "1 updates", "keep_last": 1}))
    publisher = start_publisher(role)
    names = publish(publisher, role, 1)
    promote(role, names[0])
    role.checkpoints.store.put(PROMOTED, b"garbage")
    names += publish(publisher, role, 2, 3)
    assert role.checkpoints.names() == names and role.checkpoints.marked("latest") == names[-1]
    role.checkpoints.write_promotion(None)
    publish(publisher, role, 4)
    assert role.checkpoints.names() == [checkpoint_name(4, 256)]


def test_the_manifest_tells_the_newest_score_that_was_known_when_it_was_written(
    make_role: MakeRole, start_publisher: StartPublisher
) -> None:
    role = make_role()
    publisher = start_publisher(role)

    def told(*versions: int) -> Any:
        return role.checkpoints.manifest(publish(publisher, role, *versions)[-1]).provenance["evaluation"]

    assert told(1, 2) is None
    score(role, checkpoint_name(2, 128), 7.0)
    score(role, checkpoint_name(1, 64), 9.0)
    expected = {"checkpoint": checkpoint_name(2, 128), "mean_return": 7.0, "episodes": None}
    assert told(3) == expected
    role.redis.delete(RunKeys(role.run_id).evaluations)
    assert told(4) == expected, "the status file remembers"


def test_what_the_pointer_names_is_never_pruned(make_role: MakeRole, start_publisher: StartPublisher) -> None:
    base = make_role(minimal_config(checkpoint={"every": "1 updates", "keep_last": 1}))
    named_when_deleted: list[tuple[str, set[str]]] = []

    def before(word: str, key: str) -> None:
        pointer = base.checkpoints.pointer()
        if word == "delete" and pointer is not None:
            named = {name for name in (pointer.latest, pointer.best, pointer.final) if name}
            named_when_deleted.append((key.removeprefix(CHECKPOINTS).partition("/")[0], named))

    role, _ = watched(base, before)
    publisher = start_publisher(role)
    for version in range(6):
        (name,) = publish(publisher, role, version)
        score(role, name, float(version % 3))
    pointer = publisher.finish(name)
    assert pointer.final == name == pointer.latest
    assert len(named_when_deleted) > 6
    assert all(name not in named for name, named in named_when_deleted)
    for kept in {pointer.latest, pointer.best, pointer.final} - {None}:
        assert role.checkpoints.load(str(kept)).objects


def test_uploads_that_were_cut_off_do_not_take_the_place_of_whole_ones_and_go(
    make_role: MakeRole, start_publisher: StartPublisher
) -> None:
    role = make_role(minimal_config(checkpoint={"every": "1 updates", "keep_last": 2}))
    publisher = start_publisher(role)
    publish(publisher, role, 1)
    for version in (2, 3, 9):
        role.checkpoints.store.put(f"{CHECKPOINTS}{checkpoint_name(version, 0)}/0/trainer/state.json", b"half")
    publish(publisher, role, 4)
    assert role.checkpoints.names() == [checkpoint_name(1, 64), checkpoint_name(4, 256), checkpoint_name(9, 0)]
    with pytest.raises(CheckpointNotFound):
        role.checkpoints.manifest(checkpoint_name(9, 0))


def test_a_store_that_fails_does_not_block_is_told_and_all_is_durable_later(
    make_role: MakeRole, start_publisher: StartPublisher
) -> None:
    base = make_role()
    positions, away = fill_log(base), [True]

    def before(word: str, key: str) -> None:
        if away[0]:
            raise StoreError("the store is on fire")

    role, _ = watched(base, before)
    publisher = start_publisher(role)
    for version in range(3):
        publisher.submit(snapshot_of(role, version, positions[0]))  # returns although nothing can be stored
    eventually(lambda: store_status(role).get("attempts", 0) >= 2)
    status = store_status(role)
    assert status["waiting_for"] == "the store" and "on fire" in status["error"] and status["since"] > 0
    with pytest.raises(WaitTimeout, match=r"not durable after 0\.05 s; is the store away"):
        publisher.wait_idle(0.05)
    assert set(written(role)) == {ENVIRONMENT}
    assert len(ExperienceLog(role.redis, role.run_id)) == 2, "nothing is durable, so nothing is trimmed"
    assert any(event.kind == "store" and "on fire" in event.text for event in read_events(role.redis, role.run_id))
    away[0] = False
    publisher.wait_idle(PATIENCE)
    latest = role.checkpoints.load_latest()
    assert latest is not None and latest.manifest.version == 2, "the newest; those it replaced were covered by it"
    assert store_status(role) == {"durable": latest.manifest.name}
    assert len(ExperienceLog(role.redis, role.run_id)) == 1
    assert publisher.failure is None


@pytest.mark.parametrize("fails_at", range(6))
def test_a_failure_at_any_step_is_made_good_by_the_next_try(
    make_role: MakeRole, start_publisher: StartPublisher, fails_at: int
) -> None:
    base, calls = make_role(), [0]

    def before(word: str, key: str) -> None:
        calls[0] += 1
        if calls[0] == fails_at + 1:
            raise StoreError("once")

    role, _ = watched(base, before)
    publisher = start_publisher(role)
    (name,) = publish(publisher, role, 1)
    latest = role.checkpoints.load_latest()
    assert latest is not None and latest.manifest.name == name
    assert role.checkpoints.marker(READY) is not None and role.checkpoints.marker(STATUS) is not None


def test_an_older_trainers_publisher_writes_nothing_trims_nothing_and_fails_as_fenced(
    make_role: MakeRole, start_publisher: StartPublisher
) -> None:
    role = make_role()
    positions = fill_log(role)
    old = start_publisher(role)
    publish(old, role, 1)
    new = start_publisher(role)
    before, status = written(role), store_status(role)
    old.submit(snapshot_of(role, 2, positions[1]))
    with pytest.raises(Fenced, match="epoch 1 may not write checkpoints; a newer trainer has taken over"):
        old.wait_idle(PATIENCE)
    assert isinstance(old.failure, Fenced)
    with pytest.raises(Fenced):
        old.finish(checkpoint_name(1, 64))
    assert written(role) == before and store_status(role) == status
    assert len(ExperienceLog(role.redis, role.run_id)) == 2
    publish(new, role, 2)
    assert new.failure is None and role.checkpoints.names() == [checkpoint_name(1, 64), checkpoint_name(2, 128)]


def test_a_trainer_fenced_in_the_middle_of_an_upload_moves_no_pointer_and_trims_nothing(
    make_role: MakeRole, start_publisher: StartPublisher
) -> None:
    base = make_role()
    positions = fill_log(base)

    def before(word: str, key: str) -> None:
        if "2_Step-128.ckpt/" in key and key.endswith(MANIFEST):
            base.flow.take_over()

    role, store = watched(base, before)
    publisher = start_publisher(role)
    publish(publisher, role, 1)
    pointer, status = role.checkpoints.pointer(), role.checkpoints.marker(STATUS)
    publisher.submit(snapshot_of(role, 2, positions[1]))
    with pytest.raises(Fenced):
        publisher.wait_idle(PATIENCE)
    assert store.changes[-1].endswith(MANIFEST)
    assert role.checkpoints.pointer() == pointer and role.checkpoints.marker(STATUS) == status
    assert len(ExperienceLog(role.redis, role.run_id)) == 2


def test_a_manifest_that_the_store_takes_late_is_the_one_that_the_pointer_names(
    make_role: MakeRole, start_publisher: StartPublisher
) -> None:
    """The first try is given up and carried out after the second; meanwhile there is news, such as a score."""
    base = make_role()
    late: list[tuple[str, bytes]] = []

    class Slow(Watched):
        def __getattr__(self, name: str) -> Any:
            found = super().__getattr__(name)

            def put(key: str, data: bytes) -> None:
                if key.endswith(f"/{MANIFEST}") and not late:
                    late.append((key, data))
                    score(base, checkpoint_name(1, 64), 7.0)
                    raise StoreError("timed out")
                found(key, data)

            return put if name == "put" else found

    slow = dataclasses.replace(base, checkpoints=CheckpointStore(Slow(base.checkpoints.store), base.run_id))
    (name,) = publish(start_publisher(slow), base, 1)
    base.checkpoints.store.put(*late[0])
    latest = base.checkpoints.load_latest()
    assert latest is not None and latest.manifest.name == name


def test_the_same_version_again_is_recognised_and_other_contents_come_beside_it(
    make_role: MakeRole, start_publisher: StartPublisher
) -> None:
    role = make_role()
    names = publish(start_publisher(role), role, 1, 2)
    before = written(role)
    successor = start_publisher(role)
    successor.submit(snapshot_of(role, 2, epoch=2))
    successor.wait_idle(PATIENCE)
    after = written(role)
    assert {key for key in after if after[key] != before.get(key)} == {POINTER}, "which the new epoch has signed"
    other = snapshot_of(role, 2, content=b"other", epoch=2)
    successor.submit(other)
    successor.wait_idle(PATIENCE)
    assert role.checkpoints.load(names[1]).objects == other.objects
    latest, kept = role.checkpoints.load_latest(), snapshot_of(role, 2)
    assert latest is not None and latest.objects == other.objects
    assert all(role.checkpoints.store.get(kept.manifest.folder + key) == kept.objects[key] for key in kept.objects)
