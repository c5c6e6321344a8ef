"""The store's promises, each kept by the folder, by rclone and by moto; and what it says when it cannot keep them."""

from __future__ import annotations

import json
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.services import BUCKET, free_port, new_secret
from shared.connection import Address
from shared.errors import ObjectMissing, PreconditionFailed, StoreError, StoreUnavailable
from shared.object_store import ObjectStore, open_store
from tests.conftest import minimal_config

Servers = dict[str, tuple[str, str, str]]
OpenS3 = Callable[..., ObjectStore]
QUICK = {"timeout_seconds": 5, "retries": 0}


@pytest.fixture
def open_s3(tmp_path: Path, unique_run_id: str) -> OpenS3:
    """`open_s3(server, bucket=…, secret=…, endpoint=…)` → a store that gives up at once."""

    def make(
        server: tuple[str, str, str], bucket: str = BUCKET, secret: str | None = None, endpoint: str | None = None
    ) -> ObjectStore:
        file = tmp_path / "keys.json"
        file.write_text(json.dumps({"s3_access_key": server[1], "s3_secret_key": secret or server[2]}))
        address = Address(unique_run_id, "", f"s3://{bucket}/tests", endpoint or server[0], str(file))
        return open_store(address, minimal_config(store=QUICK))

    return make


def file_store(folder: Path) -> ObjectStore:
    """A store of run `r` below `folder`."""
    return open_store(Address("r", "", f"file://{folder}"), minimal_config())


# What every store promises


def test_check_passes_where_the_store_is_usable(any_store: ObjectStore) -> None:
    any_store.check()


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 4096], ids=["empty", "one byte", "1 MiB"])
def test_what_was_put_is_what_get_answers(any_store: ObjectStore, data: bytes) -> None:
    any_store.put("checkpoints/1_Step-2.ckpt/default/policy.safetensors", data)
    assert any_store.get("checkpoints/1_Step-2.ckpt/default/policy.safetensors") == data


def test_a_second_put_replaces_the_first(any_store: ObjectStore) -> None:
    any_store.put(".checkpoint", b"long first content")
    any_store.put(".checkpoint", b"short")
    assert any_store.get(".checkpoint") == b"short"


def test_an_object_that_is_not_there_is_missing_by_name(any_store: ObjectStore) -> None:
    any_store.put("folder/object", b"1")
    for key in ("nothing", "folder/nothing", "folder"):
        with pytest.raises(ObjectMissing, match=key):
            any_store.get(key)


def test_if_absent_writes_once_and_keeps_the_first(any_store: ObjectStore) -> None:
    any_store.put("manifest.json", b"first", if_absent=True)
    with pytest.raises(PreconditionFailed, match=r"manifest\.json exists already"):
        any_store.put("manifest.json", b"second", if_absent=True)
    assert any_store.get("manifest.json") == b"first"
    assert any_store.keys("") == ["manifest.json"]


def test_a_store_that_claims_conditional_writes_lets_exactly_one_of_many_win(any_store: ObjectStore) -> None:
    if not any_store.conditional_writes:
        return  # then `if_absent` looks first, and the epoch is what keeps two writers apart
    outcomes: list[str] = []

    def write(text: str) -> None:
        try:
            any_store.put("contested", text.encode(), if_absent=True)
            outcomes.append(text)
        except PreconditionFailed:
            outcomes.append("refused")

    threads = [threading.Thread(target=write, args=(f"writer {index}",)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [outcome for outcome in outcomes if outcome != "refused"]
    assert len(outcomes) == 6 and len(winners) == 1
    assert any_store.get("contested") == winners[0].encode()


def test_finding_out_about_conditional_writes_leaves_nothing_behind(any_store: ObjectStore) -> None:
    assert any_store.conditional_writes == any_store.conditional_writes
    assert any_store.keys("") == []


def test_delete_removes_and_may_be_repeated(any_store: ObjectStore) -> None:
    any_store.put("a/b/c", b"1")
    any_store.put("a/d", b"2")
    any_store.delete("a/b/c")
    any_store.delete("a/b/c")
    any_store.delete("never/was/there")
    assert any_store.keys("") == ["a/d"]
    assert any_store.folders("a/") == []
    with pytest.raises(ObjectMissing):
        any_store.get("a/b/c")


def test_keys_are_all_that_start_with_the_prefix_sorted(any_store: ObjectStore) -> None:
    for key in ("x/b", "x/a/deep/one", "xy", "y/z", ".ready"):
        any_store.put(key, b"1")
    assert any_store.keys("") == [".ready", "x/a/deep/one", "x/b", "xy", "y/z"]
    assert any_store.keys("x/") == ["x/a/deep/one", "x/b"]
    assert any_store.keys("x") == ["x/a/deep/one", "x/b", "xy"]
    assert any_store.keys("x/a/deep/o") == ["x/a/deep/one"]
    assert any_store.keys("nothing/") == []


def test_folders_are_the_names_directly_below_sorted(any_store: ObjectStore) -> None:
    for key in ("checkpoints/2/a/b", "checkpoints/10/a", "checkpoints/1/a", "checkpoints/file", "other/3/x"):
        any_store.put(key, b"1")
    assert any_store.folders("checkpoints/") == ["1", "10", "2"]
    assert any_store.folders("nothing/") == []


def test_more_keys_than_one_page_of_a_listing_are_all_listed(
    s3_servers: Servers, open_s3: OpenS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_s3(s3_servers["rclone"])
    expected = [f"checkpoints/{index:02}/manifest.json" for index in range(7)]
    for key in expected:
        store.put(key, b"1")
    call = store._call  # type: ignore[attr-defined]
    monkeypatch.setattr(
        store, "_call", lambda name, *args, **kw: call(name, *args, **(kw | ({"MaxKeys": 2} if "list" in name else {})))
    )
    assert store.keys("") == expected
    assert store.folders("checkpoints/") == [f"{index:02}" for index in range(7)]


def test_runs_whose_ids_begin_alike_do_not_see_each_other(
    tmp_path: Path, s3_servers: Servers, unique_run_id: str
) -> None:
    endpoint, access, secret = s3_servers["rclone"]
    (tmp_path / "keys.json").write_text(json.dumps({"s3_access_key": access, "s3_secret_key": secret}))
    for url in (f"file://{tmp_path}", f"s3://{BUCKET}", f"s3://{BUCKET}/a/b"):
        one, two = (
            open_store(Address(run, "", url, endpoint, str(tmp_path / "keys.json")), minimal_config())
            for run in (unique_run_id, unique_run_id + "0")
        )
        one.put("checkpoints/1/x", b"one")
        two.put("checkpoints/2/x", b"two")
        assert one.keys("") == ["checkpoints/1/x"] and two.keys("") == ["checkpoints/2/x"]
        assert one.folders("checkpoints/") == ["1"]


# What it says when it cannot be used


def test_a_missing_bucket_is_named_with_what_to_do(s3_servers: Servers, open_s3: OpenS3) -> None:
    for server in s3_servers.values():
        store = open_s3(server, bucket="no-such-bucket")
        with pytest.raises(StoreUnavailable, match=r"no bucket 'no-such-bucket'; create it or correct store\.url"):
            store.check()
        with pytest.raises(StoreUnavailable, match="no-such-bucket"):
            store.put("key", b"1")


def test_wrong_keys_are_refused_with_what_to_do_and_without_the_secret(s3_servers: Servers, open_s3: OpenS3) -> None:
    wrong = new_secret()
    store = open_s3(s3_servers["rclone"], secret=wrong)
    attempts: list[Callable[[], object]] = [
        store.check, lambda: store.get("x"), lambda: store.put("x", b""), lambda: store.keys("")
    ]  # fmt: skip
    for attempt in attempts:
        with pytest.raises(StoreUnavailable, match=r"refuses the credentials.*check AWS_ACCESS_KEY_ID") as caught:
            attempt()
        assert wrong not in str(caught.value)
        assert s3_servers["rclone"][1] not in str(caught.value)


def test_no_credentials_at_all_says_which_to_set(
    s3_servers: Servers, unique_run_id: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = open_store(
        Address(unique_run_id, "", f"s3://{BUCKET}", s3_servers["rclone"][0]), minimal_config(store=QUICK)
    )
    with pytest.raises(StoreUnavailable, match="no credentials found; set AWS_ACCESS_KEY_ID"):
        store.check()


def test_an_endpoint_that_does_not_answer_is_named_with_what_to_do(s3_servers: Servers, open_s3: OpenS3) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    store = open_s3(s3_servers["rclone"], endpoint=endpoint)
    for attempt in (store.check, lambda: store.get("x"), lambda: store.put("x", b"1", if_absent=True)):
        with pytest.raises(StoreUnavailable, match=r"does not answer.*start it or correct store\.url") as caught:
            attempt()
        assert endpoint in str(caught.value)
        assert s3_servers["rclone"][2] not in str(caught.value)


def test_a_missing_store_folder_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"nowhere is not there; create it or correct store\.url"):
        file_store(tmp_path / "nowhere").check()
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match=r"correct store\.url"):
        file_store(tmp_path / "file").check()


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_a_folder_without_permission_is_named_with_what_to_do(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreUnavailable, match="cannot be written; check its permissions"):
            file_store(tmp_path).check()
        with pytest.raises(StoreError, match="writing key"):
            file_store(tmp_path).put("key", b"1")
    finally:
        tmp_path.chmod(0o700)


# The folder


def test_a_folder_that_is_full_fails_by_name_keeps_the_old_object_and_leaves_nothing_behind(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    store.put("a/object", b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(StoreError, match=r"writing a/object to .* failed"):
            store.put("a/object", bytes(100_000))
        with pytest.raises(StoreError, match=r"writing a/other to .* failed"):
            store.put("a/other", bytes(100_000), if_absent=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert store.get("a/object") == b"old"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["object"]


def test_a_file_in_the_place_of_a_folder_fails_by_name(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    store.put("checkpoints", b"a file")
    for key in ("checkpoints/x", "checkpoints/1/x"):
        with pytest.raises(StoreError, match=f"writing {key}"):
            store.put(key, b"1")
        with pytest.raises(StoreError, match=f"writing {key}"):
            store.put(key, b"1", if_absent=True)
        with pytest.raises(ObjectMissing):
            store.get(key)
    assert store.keys("") == ["checkpoints"]


def test_a_reader_of_the_folder_sees_whole_objects_only_and_never_a_temporary_name(tmp_path: Path) -> None:
    store, reader = file_store(tmp_path), file_store(tmp_path)
    contents = [bytes([index]) * (200_000 + index) for index in range(3)]
    store.put("a/object", contents[0])
    writing = threading.Event()
    writing.set()

    def write() -> None:
        for index in range(60):
            store.put("a/object", contents[index % 3])
            store.put(f"a/new-{index % 5}", contents[index % 3])
            store.delete(f"a/new-{index % 5}")
        writing.clear()

    thread = threading.Thread(target=write)
    thread.start()
    seen = set()
    while writing.is_set():
        assert reader.get("a/object") in contents
        seen |= set(reader.keys(""))
    thread.join()
    assert seen <= {"a/object", *(f"a/new-{index}" for index in range(5))}


def test_what_a_killed_writer_left_is_not_listed(tmp_path: Path) -> None:
    store = file_store(tmp_path)
    store.put("a/object", b"1")
    (tmp_path / "r" / "a" / ".partial-abc").write_bytes(b"half")
    assert store.keys("") == ["a/object"]


def test_objects_get_the_permissions_of_ordinary_files(tmp_path: Path) -> None:
    file_store(tmp_path).put("object", b"1")
    (tmp_path / "ordinary").write_text("")
    assert (tmp_path / "r" / "object").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


@pytest.mark.parametrize("key", ["../outside", "a/../../outside", "/tmp/outside"])
def test_a_key_cannot_leave_the_run(tmp_path: Path, key: str) -> None:
    with pytest.raises(StoreError, match="leaves the store folder"):
        file_store(tmp_path).put(key, b"1")
