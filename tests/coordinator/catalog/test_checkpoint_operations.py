"""Verify, prune, promote and export on real checkpoints, on a folder and on both S3 servers; and on a live run."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from stagecoach.coordinator.catalog.checkpoint_lookup import evaluate, find_checkpoint
from stagecoach.coordinator.catalog.checkpoint_operations import Removed, export, list_checkpoints, prune_checkpoints
from stagecoach.coordinator.lifecycle.launcher import first_policies
from stagecoach.coordinator.run_access.run import Run
from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.shared.base.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, StoreError, UserError
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.sections import CheckpointConfig
from stagecoach.shared.deployment.deployed_policy import load_policy
from stagecoach.shared.policies.serialization import decode_policy, encode_policy
from stagecoach.shared.storage.checkpoint_store import (
    CHECKPOINTS,
    MANIFEST,
    POINTER,
    PROMOTED,
    STATUS,
    CheckpointStore,
    describe_objects,
)
from stagecoach.shared.storage.object_store import FileStore, ObjectStore
from stagecoach.trainer_node.checkpointing.retention import announce, remove, take_inventory, to_prune
from stagecoach.trainer_node.checkpointing.verification import promote, verify, withdraw
from tests.conftest import minimal_config
from tests.support.processes.command_line import contents, until
from tests.support.runs.checkpoints import key_of

POLICY, STATE = "default/policy.safetensors", "trainer/state.json"
NAMES = [f"{version}_Step-{version * 64}.ckpt" for version in range(5)]
NAME = NAMES[2]
HALF = "3_Step-1.ckpt"


Copy = Callable[[ObjectStore], CheckpointStore]


@pytest.fixture
def copied(ended_run: Run, monkeypatch: pytest.MonkeyPatch) -> Copy:
    """Copies the run's checkpoints into a store, where a test may spoil them; what is damaged is not read again."""
    monkeypatch.setattr("stagecoach.shared.storage.checkpoint_store._READ_PAUSES_SECONDS", ())

    def copy(store: ObjectStore) -> CheckpointStore:
        source = ended_run.checkpoint_store().store
        for key in source.keys(""):
            store.put(key, source.get(key))
        return CheckpointStore(store, "a")

    return copy


@pytest.fixture
def checkpoints(copied: Copy, any_store: ObjectStore) -> CheckpointStore:
    return copied(any_store)


@pytest.fixture
def files(copied: Copy, tmp_path: Path) -> CheckpointStore:
    """Checkpoints in a folder."""
    (tmp_path / "files").mkdir()
    return copied(FileStore(tmp_path / "files", "a"))


def altered(checkpoints: CheckpointStore, before: Callable[[str, str], None]) -> CheckpointStore:
    """One whose store does something else before each call, of which it is told name and key."""

    class Altered:
        def __getattr__(self, name: str) -> Any:
            def call(key: str = "", *args: Any, **options: Any) -> Any:
                before(name, key)
                return getattr(checkpoints.store, name)(key, *args, **options)

            return call

    return CheckpointStore(cast(ObjectStore, Altered()), checkpoints.run_id)


def cut_off(checkpoints: CheckpointStore, after: int, words: Container[str] | None = None) -> CheckpointStore:
    """One whose store takes this number of calls (of these kinds), and then fails."""
    count = itertools.count()

    def fail(word: str, key: str) -> None:
        if (words is None or word in words) and next(count) >= after:
            raise StoreError("cut off")

    return altered(checkpoints, fail)


def listing(checkpoints: CheckpointStore) -> dict[str, bytes]:
    return {key: checkpoints.store.get(key) for key in checkpoints.store.keys("")}


def rewrite(checkpoints: CheckpointStore, policy: bytes) -> None:
    """A checkpoint with another policy, whose sizes and hashes are right everywhere."""
    there = checkpoints.load(NAME)
    objects = there.objects | {POLICY: policy}
    changed = {"objects": describe_objects(objects), "epoch": there.manifest.epoch + 1}
    data = checkpoints.write(there.manifest.model_copy(update=changed), objects)
    status = checkpoints.marker(STATUS)
    assert status is not None
    entry = next(entry for entry in status["checkpoints"] if entry["name"] == NAME)
    entry["manifest_sha256"] = hashlib.sha256(data).hexdigest()
    checkpoints.write_marker(STATUS, status)


def not_finite(checkpoints: CheckpointStore) -> bytes:
    """The policy with one weight that is NaN."""
    policy, version = decode_policy(checkpoints.load(NAME).objects[POLICY])
    with torch.no_grad():
        next(tensor for name, tensor in policy.named_parameters() if name.endswith("weight")).view(-1)[0] = torch.nan
    return encode_policy(policy, version)


def half_upload(checkpoints: CheckpointStore, name: str = HALF) -> None:
    checkpoints.store.put(f"{CHECKPOINTS}{name}/0123456789abcdef/{STATE}", b"half")


def test_whole_checkpoints_are_ok(checkpoints: CheckpointStore) -> None:
    before = listing(checkpoints)
    found = verify(checkpoints)
    assert [(verdict.name, verdict.state, verdict.objects) for verdict in found] == [(name, "ok", 3) for name in NAMES]
    assert found[0].bytes == sum(
        len(data) for key, data in before.items() if f"/{NAMES[0]}/" in f"/{key}" and not key.endswith(MANIFEST)
    )
    assert [verdict.name for verdict in verify(checkpoints, "latest")] == NAMES[-1:]
    assert listing(checkpoints) == before


def spoil(key: str, change: Callable[[bytes], bytes | None]) -> Callable[[CheckpointStore], None]:
    """Changes one object; None removes it."""

    def do(checkpoints: CheckpointStore) -> None:
        place = key_of(checkpoints, NAME, key)
        changed = change(checkpoints.store.get(place))
        checkpoints.store.delete(place)
        if changed is not None:
            checkpoints.store.put(place, changed)

    return do


DAMAGES: dict[str, tuple[Callable[[CheckpointStore], None], str]] = {
    "flipped": (spoil(STATE, lambda data: data[:-1] + b"?"), f"{STATE} was altered: its SHA-256"),
    "cut": (spoil(STATE, lambda data: data[:7]), "was altered: 7 bytes, the manifest says"),
    "missing": (spoil(POLICY, lambda _: None), f"lacks its object {POLICY}"),
    "no manifest": (spoil(MANIFEST, lambda _: None), "manifest.json is missing"),
    "garbage manifest": (spoil(MANIFEST, lambda _: b"{"), "cannot be read"),
    "replaced manifest": (spoil(MANIFEST, lambda data: data + b" "), f"is not the one that {STATUS} names"),
    "NaN": (lambda store: rewrite(store, not_finite(store)), f"{POLICY} has weights that are not finite"),
    "no policy": (lambda store: rewrite(store, b"no policy"), f"{POLICY}: policy.safetensors is undecodable"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_names_damage_which_blocks_promote_and_export(
    ended_run: Run, files: CheckpointStore, tmp_path: Path, damage: str
) -> None:
    promote(files, NAMES[0], live=False)
    spoil_it, said = DAMAGES[damage]
    spoil_it(files)
    before = listing(files)
    found = {verdict.name: verdict for verdict in verify(files)}
    assert {name: verdict.state for name, verdict in found.items()} == {
        name: "damaged" if name == NAME else "ok" for name in NAMES
    }
    assert len(found[NAME].problems) == 1 and said in found[NAME].problems[0]
    assert verify(files, NAME) == [found[NAME]]
    with pytest.raises(CheckpointDamaged, match=rf"{NAME} is not promoted: .*{said}"):
        promote(files, NAME, live=False)
    if damage != "replaced manifest":  # which is whole in itself
        with pytest.raises(CheckpointError):
            export(files, ended_run.config, NAME, tmp_path / "out")
        assert list((tmp_path / "out").iterdir()) == []
    assert listing(files) == before


def test_all_damages_of_a_checkpoint_are_named_at_once(checkpoints: CheckpointStore) -> None:
    for damage in ("flipped", "missing", "replaced manifest"):
        DAMAGES[damage][0](checkpoints)
    (found,) = verify(checkpoints, NAME)
    assert len(found.problems) == 3


def test_verify_compares_manifest_with_pointer_and_promotion(checkpoints: CheckpointStore) -> None:
    promote(checkpoints, "latest", live=False)
    key = key_of(checkpoints, NAMES[-1], MANIFEST)
    checkpoints.store.put(key, checkpoints.store.get(key) + b" ")
    (found,) = verify(checkpoints, NAMES[-1])
    assert [problem.split()[-2] for problem in found.problems] == [STATUS, POINTER, PROMOTED]
    with pytest.raises(CheckpointDamaged, match="is not the one that was promoted"):
        checkpoints.preferred()


def test_verify_reports_cut_off_upload_which_blocks_promote(checkpoints: CheckpointStore) -> None:
    half_upload(checkpoints)
    half_upload(checkpoints, newer := "9_Step-9.ckpt")
    assert {v.name: v.state for v in verify(checkpoints) if v.state != "ok"} == {HALF: "cut off", newer: "cut off"}
    assert [v.state for v in verify(checkpoints, newer, live=True)] == ["being written"]
    assert [v.state for v in verify(checkpoints, HALF, live=True)] == ["cut off"]
    before = listing(checkpoints)
    for name, said in ((HALF, "not complete"), ("8_Step-8.ckpt", "there are:"), ("promoted", "no promoted checkpoint")):
        with pytest.raises(CheckpointNotFound, match=said):
            promote(checkpoints, name, live=False)
    assert listing(checkpoints) == before


def test_damaged_sync_files_are_named(checkpoints: CheckpointStore) -> None:
    promote(checkpoints, NAMES[0], live=False)
    checkpoints.delete(NAMES[0])
    found = verify(checkpoints)[-1]
    assert (found.name, found.problems) == (PROMOTED, (f"names {NAMES[0]} as promoted, which is gone",))
    for key in (STATUS, POINTER, PROMOTED):
        checkpoints.store.put(key, b"garbage")
    found_all = {verdict.name: verdict.state for verdict in verify(checkpoints)}
    assert found_all == dict.fromkeys(NAMES[1:], "ok") | dict.fromkeys((STATUS, POINTER, PROMOTED), "damaged")


def test_promoted_is_listed_preferred_and_taken_back(checkpoints: CheckpointStore) -> None:
    assert promote(checkpoints, NAME, live=False).checkpoint == NAME
    promote(checkpoints, NAMES[1], live=False)
    marks = {entry["name"]: entry["marks"] for entry in list_checkpoints(checkpoints)}
    assert [name for name in NAMES if "promoted" in marks[name]] == [NAMES[1]]
    assert checkpoints.preferred() == NAMES[1]
    assert withdraw(checkpoints) == NAMES[1]
    assert withdraw(checkpoints) is None
    assert checkpoints.preferred() == checkpoints.resolve("best")
    assert PROMOTED not in checkpoints.store.keys("")
    checkpoints.store.put(PROMOTED, b"garbage")
    assert all("promoted" not in entry["marks"] for entry in list_checkpoints(checkpoints))
    promote(checkpoints, NAME, live=False)
    assert checkpoints.preferred() == NAME


def test_promote_and_prune_race_has_one_winner(files: CheckpointStore) -> None:
    """Between any two steps of the pruning, and the pruning between any two steps of the promotion."""
    rule, pointer = CheckpointConfig(keep_last=1), files.pointer()
    assert pointer is not None
    whole, outcomes = listing(files), list[str]()
    goes = to_prune(take_inventory(files, {}), pointer, rule, ())[-1]
    for step in range(6):
        for key, data in whole.items():
            files.store.put(key, data)
        files.store.delete(PROMOTED)
        count = [0]

        def at_step(word: str, key: str, count: list[int] = count, step: int = step) -> None:
            if (word, key) in {("put", STATUS), ("get", PROMOTED)} or word == "delete":
                count[0] += 1
                if count[0] == step + 1:
                    try:
                        promote(files, goes, live=True)
                        outcomes.append("promoted")
                    except CheckpointError:
                        outcomes.append("refused")

        pruning = altered(files, at_step)
        inventory = take_inventory(pruning, {})
        announced, _ = announce(pruning, inventory, pointer, rule, ())
        list(remove(pruning, inventory, pointer, announced))
        if outcomes[-1] == "promoted":
            assert [verdict.state for verdict in verify(files, "promoted")] == ["ok"], step
        else:
            assert files.promotion() is None
    assert set(outcomes) == {"promoted", "refused"}


def test_pruning_keeps_what_is_marked_and_what_the_rule_says(checkpoints: CheckpointStore) -> None:
    promote(checkpoints, NAMES[1], live=False)
    half_upload(checkpoints)
    half_upload(checkpoints, "9_Step-9.ckpt")
    pointer, before = checkpoints.pointer(), listing(checkpoints)
    assert pointer is not None
    rule = CheckpointConfig(keep_last=1, keep_every=3)
    stay = {NAMES[0], NAMES[1], NAMES[3], NAMES[4], pointer.best}  # version 0 is a multiple of 3 as well
    sizes = {entry["name"]: entry["bytes"] for entry in list_checkpoints(checkpoints)}
    gone = [name for name in checkpoints.names() if name not in stay and name != "9_Step-9.ckpt"]
    expected = [Removed(name, sizes.get(name)) for name in gone]
    assert prune_checkpoints(checkpoints, rule, dry_run=True) == expected
    assert listing(checkpoints) == before
    assert prune_checkpoints(checkpoints, rule, dry_run=False) == expected
    assert checkpoints.names() == [*(name for name in NAMES if name in stay), "9_Step-9.ckpt"]
    assert checkpoints.pointer() == pointer
    assert [entry["name"] for entry in list_checkpoints(checkpoints)] == [name for name in NAMES if name in stay]
    assert {v.state for v in verify(checkpoints) if v.name != "9_Step-9.ckpt"} == {"ok"}
    assert prune_checkpoints(checkpoints, rule, dry_run=False) == []


def test_interrupted_prune_is_completed_by_next(files: CheckpointStore) -> None:
    rule, whole, pointer = CheckpointConfig(keep_last=1), listing(files), files.pointer()
    assert pointer is not None
    for step in range(100):
        for key, data in whole.items():
            files.store.put(key, data)
        try:
            prune_checkpoints(cut_off(files, step, {"put", "delete"}), rule, dry_run=False)
            break
        except StoreError:
            found = verify(files)
            assert {v.state for v in found} <= {"ok", "cut off"}, found
            prune_checkpoints(files, rule, dry_run=False)
            assert files.pointer() == pointer
            assert files.names() == [name for name in NAMES if name in {pointer.latest, pointer.best}]
    assert step > 10, "each write and each removal was tried"


def test_prune_refuses_damaged_newest_checkpoint_or_mark(files: CheckpointStore) -> None:
    whole = listing(files)
    for key in (*(key_of(files, NAMES[-1], key) for key in (STATE, MANIFEST)), POINTER, PROMOTED):
        files.store.put(key, b"garbage")
        before = listing(files)
        with pytest.raises(CheckpointDamaged):
            prune_checkpoints(files, CheckpointConfig(keep_last=1), dry_run=False)
        assert listing(files) == before
        files.store.delete(key)
        if key in whole:
            files.store.put(key, whole[key])


def test_exported_checkpoint_is_self_contained(ended_run: Run, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    out = tmp_path / "out" / "deep"
    folder = export(checkpoints, ended_run.config, NAME, out)
    assert folder == out / "a" / "checkpoints" / NAME
    copy = CheckpointStore(FileStore(out, "a"), "a")
    assert copy.load(NAME) == checkpoints.load(NAME)
    assert [verdict.state for verdict in verify(copy)] == ["ok"]
    latest = copy.load_latest()
    assert latest is not None and latest.manifest.name == NAME
    for source in (folder, folder.parent.parent):
        assert load_policy(source).version == 2
        assert evaluate(str(source), tmp_path, 1).checkpoint == NAME
    assert [path.name for path in out.iterdir()] == ["a"]


def test_export_prefers_promoted_and_overwrites_nothing(ended_run: Run, files: CheckpointStore, tmp_path: Path) -> None:
    assert export(files, ended_run.config, None, tmp_path / "out").name == files.resolve("best")
    before = contents(tmp_path / "out")
    promote(files, NAMES[0], live=False)
    with pytest.raises(UserError, match=r"out/a exists; choose another folder"):
        export(files, ended_run.config, None, tmp_path / "out")
    assert contents(tmp_path / "out") == before
    assert export(files, ended_run.config, None, tmp_path / "other").name == NAMES[0]
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot write to .*file"):
        export(files, ended_run.config, NAME, tmp_path / "file")


def test_failed_export_leaves_nothing(ended_run: Run, files: CheckpointStore, tmp_path: Path) -> None:
    for step in range(100):
        try:
            export(cut_off(files, step), ended_run.config, NAME, tmp_path / "out")
            break
        except StoreError:
            assert list((tmp_path / "out").glob("*")) == []
    assert step > 5


@pytest.mark.exhaustive
@pytest.mark.timeout(180)
def test_live_run_is_verified_promoted_and_exported_during_prune(config: Callable[..., Config], tmp_path: Path) -> None:
    made = config(checkpoint={"every": "2 updates", "keep_last": 4}, stop_at={"updates": 10**6})
    run = Run.start(made, "a", inline=True)
    try:
        other = Run.attach("a", made.runs_dir)
        until(run, lambda status: status.version >= 6)
        promoted = other.promote("latest")
        for _ in range(10):
            assert {v.state for v in other.verify()} <= {"ok", "being written"}
        version = run.status(accounting=False).version
        until(run, lambda status: status.version >= version + 14)
        assert promoted in other.checkpoint_store().names(), "the trainer keeps what is promoted"
        (entry,) = [entry for entry in other.checkpoints() if "promoted" in entry["marks"]]
        assert entry["name"] == promoted
        assert other.policy().version == other.policy("promoted").version == entry["version"]
        assert other.export(tmp_path / "out").name == promoted
        with pytest.raises(UserError, match="run 'a' is live, and its trainer prunes by itself"):
            other.prune()
    finally:
        run.stop()
    assert run.wait(60).reason == "stopped"
    assert {verdict.state for verdict in other.verify()} == {"ok"}
    again = Run.resume("a", made.runs_dir, (f"stop_at.updates={run.status().updates + 4}",), inline=True)
    assert again.wait(60).reason == "exhausted"
    assert again.checkpoint_store().preferred() == promoted, "any restart keeps it"
    left = {promoted, *(again.checkpoint_store().marked(mark) for mark in ("latest", "best"))}
    assert {item.name for item in again.prune(keep_last=1)} & left == set()
    assert set(again.checkpoint_store().names()) == left
    with pytest.raises(UserError, match="keep_last=0: expected at least 1"):
        again.prune(keep_last=0)


def test_policy_starts_from_only_policy_of_another_run(ended_run: Run) -> None:
    """Whatever its name is there."""
    begins = {
        "mine": {"hidden_sizes": ended_run.config.policies["default"].hidden_sizes, "initialize_from": ended_run.run_id}
    }
    config = minimal_config(runs_dir=str(ended_run.config.runs_dir), policies=begins)
    (found,) = first_policies(config, describe_environment(config)).values()
    assert (found.policy_id, found.checkpoint.manifest.run_id) == ("default", ended_run.run_id)
    with pytest.raises(CheckpointNotFound, match=f"leave #mine out: {ended_run.run_id}$"):
        find_checkpoint(f"{ended_run.run_id}#mine", config.runs_dir)
