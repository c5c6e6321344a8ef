"""The store's promises, each kept by the folder, by rclone and by moto; and what it says when it cannot keep them."""

from __future__ import annotations

import errno
import functools
import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stagecoach.coordinator.services.embedded import BUCKET, free_port, new_secret, start_s3
from stagecoach.shared.base.address import Address
from stagecoach.shared.base.errors import ObjectMissing, StoreError, StoreUnavailable
from stagecoach.shared.storage.object_store import ObjectStore, open_store
from stagecoach.shared.storage.s3_store import S3Store, s3_client
from tests.conftest import minimal_config
from tests.support.processes.waiting import Background, eventually
from tests.support.services import store_faults as faults
from tests.support.services.store_faults import Fault, StoreFaults

Server = tuple[str, str, str]
Servers = dict[str, Server]
OpenS3 = Callable[..., ObjectStore]
QUICK = {"timeout_seconds": 5, "retries": 0}


def s3_address(server: Server, folder: Path, run_id: str, url: str) -> Address:
    """Of a run in this server, its keys in a file."""
    keys = folder / "keys.json"
    keys.write_text(json.dumps({"s3_access_key": server[1], "s3_secret_key": server[2]}))
    return Address(run_id, "", url, server[0], str(keys))


@pytest.fixture
def open_s3(tmp_path: Path, unique_run_id: str) -> OpenS3:
    """`open_s3(server, bucket=…, endpoint=…)` → a store that gives up at once."""

    def make(server: Server, bucket: str = BUCKET, endpoint: str | None = None, **settings: float) -> ObjectStore:
        address = s3_address((endpoint or server[0], *server[1:]), tmp_path, unique_run_id, f"s3://{bucket}/tests")
        return open_store(address, minimal_config(store=QUICK | settings))

    return make


@pytest.fixture
def faulty(s3_servers: Servers) -> Iterator[StoreFaults]:
    """A fault proxy before rclone."""
    with closing(StoreFaults(s3_servers["rclone"][0])) as proxy:
        yield proxy


@pytest.fixture
def open_faulty(s3_servers: Servers, open_s3: OpenS3, faulty: StoreFaults) -> OpenS3:
    """`open_faulty(…)` → a store by way of the proxy."""
    return functools.partial(open_s3, s3_servers["rclone"], endpoint=faulty.url)


OPERATIONS: dict[str, Callable[[ObjectStore], object]] = {
    "get": lambda store: store.get("key"),
    "put": lambda store: store.put("key", b"new"),
    "keys": lambda store: store.keys(""),
    "folders": lambda store: store.folders("checkpoints/"),
    "delete": lambda store: store.delete("key"),
}


def file_store(folder: Path) -> ObjectStore:
    """A store of run `r` below `folder`."""
    return open_store(Address("r", "", f"file://{folder}"), minimal_config())


# What every store promises


KEYS = (".ready", "xy", "x/b", "x/a/deep/one", "x/a/deep/two", "x/10/a", "x/2/a/b", "x/1/a", "y/z")
PREFIXES = ("", "x", "x/", "x/a/deep/o", "x/a/", "y/", "nothing/")
STEPS = st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from([b"", bytes(range(256)), b"x", None])), max_size=20)


@settings(
    max_examples=6, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(steps=STEPS)
@example(steps=[*((key, b"1") for key in KEYS), ("xy", bytes(range(256)) * 4096), ("x/b", None), ("x/b", None)])
def test_store_is_a_mapping_with_sorted_listings(any_store: ObjectStore, steps: list[tuple[str, bytes | None]]) -> None:
    """Objects are put and (`None`) deleted, also again or where there are none."""
    expected: dict[str, bytes] = {}
    for key in any_store.keys(""):
        any_store.delete(key)
    any_store.check()
    for key, data in steps:
        if data is None:
            any_store.delete(key)
            expected.pop(key, None)
        else:
            any_store.put(key, data)
            expected[key] = data
    for prefix in PREFIXES:
        below = [key for key in expected if key.startswith(prefix)]
        assert any_store.keys(prefix) == sorted(below)
        if not prefix or prefix.endswith("/"):
            deeper = [key.removeprefix(prefix).split("/") for key in below]
            assert any_store.folders(prefix) == sorted({names[0] for names in deeper if len(names) > 1})
    for key in (*KEYS, "x", "x/a", "nothing"):
        if key in expected:
            assert any_store.get(key) == expected[key]
        else:
            with pytest.raises(ObjectMissing, match=key):
                any_store.get(key)


def test_more_keys_than_one_page_of_a_listing_are_all_listed(
    s3_servers: Servers, tmp_path: Path, unique_run_id: str
) -> None:
    config = minimal_config(store=QUICK).store
    client = s3_client(s3_address(s3_servers["rclone"], tmp_path, unique_run_id, f"s3://{BUCKET}"), config)
    client.meta.events.register("provide-client-params.s3.ListObjectsV2", lambda params, **_: params | {"MaxKeys": 2})
    store = S3Store(BUCKET, f"{unique_run_id}/", lambda: client, "the server")
    expected = [f"checkpoints/{index:02}/manifest.json" for index in range(7)]
    for key in expected:
        store.put(key, b"1")
    assert store.keys("") == expected
    assert store.folders("checkpoints/") == [f"{index:02}" for index in range(7)]


def test_runs_whose_ids_begin_alike_do_not_see_each_other(
    tmp_path: Path, s3_servers: Servers, unique_run_id: str
) -> None:
    for url in (f"file://{tmp_path}", f"s3://{BUCKET}", f"s3://{BUCKET}/a/b"):
        one, two = (
            open_store(s3_address(s3_servers["rclone"], tmp_path, run, url), minimal_config())
            for run in (unique_run_id, unique_run_id + "0")
        )
        one.put("checkpoints/1/x", b"one")
        two.put("checkpoints/2/x", b"two")
        assert one.keys("") == ["checkpoints/1/x"] and two.keys("") == ["checkpoints/2/x"]
        assert one.folders("checkpoints/") == ["1"]


# What it says when it cannot be used


def test_missing_bucket_is_named_with_remedy(s3_servers: Servers, open_s3: OpenS3) -> None:
    for server in s3_servers.values():
        store = open_s3(server, bucket="no-such-bucket")
        with pytest.raises(
            StoreUnavailable, match=r"bucket 'no-such-bucket' does not exist; create it or correct store\.url"
        ):
            store.check()
        with pytest.raises(StoreUnavailable, match="no-such-bucket"):
            store.put("key", b"1")


def test_silent_endpoint_is_named_with_remedy(s3_servers: Servers, open_s3: OpenS3) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    store = open_s3(s3_servers["rclone"], endpoint=endpoint)
    for attempt in (store.check, lambda: store.get("x"), lambda: store.put("x", b"1")):
        with pytest.raises(StoreUnavailable, match=r"does not answer.*start it or correct store\.url") as caught:
            attempt()
        assert endpoint in str(caught.value)
        assert s3_servers["rclone"][2] not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_folder_without_permission_is_named_with_remedy(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreUnavailable, match="cannot be written; check its permissions"):
            file_store(tmp_path).check()
        with pytest.raises(StoreError, match="writing key"):
            file_store(tmp_path).put("key", b"1")
    finally:
        tmp_path.chmod(0o700)


# Faults of the server and of the way to it


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (faults.EXPIRED, r"credentials have expired \(ExpiredToken\); renew them .* read again at each try"),
        (faults.UNKNOWN_KEY, r"refuses the credentials \(InvalidAccessKeyId\); check AWS_ACCESS_KEY_ID"),
        (faults.REDIRECT, r"'stagecoach' is in the region eu-central-1: --set store\.region=eu-central-1"),
        (faults.WRONG_REGION, r"in the region eu-central-1: --set store\.region=eu-central-1"),
        (faults.WRONG_REGION_IN_WORDS, r"in the region eu-central-1: --set store\.region=eu-central-1"),
        (faults.SOME_REGION, r"in another region: set store\.region, or correct store\.endpoint_url"),
        (faults.NO_BUCKET, r"the bucket 'stagecoach' does not exist; create it or correct store\.url"),
        (7200.0, r"clock and this machine's differ \(by [67]\d{3} s; ours is behind\); set"),
        (-7200.0, r"differ \(by 7\d{3} s; ours is ahead\)"),
    ],
    ids=range(9),
)
def test_lasting_fault_is_named_until_it_is_repaired(
    s3_servers: Servers, open_faulty: OpenS3, faulty: StoreFaults, fault: Fault | float, message: str
) -> None:
    store = open_faulty()
    store.put("key", b"old")
    faulty.fail(faults.clock(fault, time.time()) if isinstance(fault, float) else fault)
    for operation in [store.check, *(lambda do=do: do(store) for do in OPERATIONS.values())]:
        with pytest.raises(StoreUnavailable, match=message) as caught:
            operation()
        assert s3_servers["rclone"][1] not in str(caught.value)
    faulty.heal()
    assert store.get("key") == b"old" and store.keys("") == ["key"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (faults.INTERNAL_ERROR, r"InternalError \(HTTP 500\)"),
        (faults.SLOW_DOWN, r"SlowDown \(HTTP 503\)"),
        (faults.REQUEST_TIMEOUT, r"RequestTimeout \(HTTP 400\)"),
        (faults.LOST_PAGE, r"HTTP 404, and not as an S3 server says it"),
        (faults.WEB_PAGE, r"is not an S3 server .*store\.endpoint_url|HTTP 500, and not as an S3 server says it"),
        (faults.EMPTY, r"is not an S3 server"),
        (faults.ELSEWHERE, r"is not an S3 server"),
        (faults.HANG, r"(?i)read timeout"),
    ],
    ids=["500", "503", "request timeout", "foreign 404", "foreign page", "nothing", "redirect", "hang"],
)
def test_passing_fault_is_a_store_error(open_faulty: OpenS3, faulty: StoreFaults, fault: Fault, message: str) -> None:
    patient = open_faulty()
    store = open_faulty(timeout_seconds=0.3) if fault == faults.HANG else patient
    patient.put("key", b"old")
    answered = fault in (faults.WEB_PAGE, faults.EMPTY)
    for name, operation in OPERATIONS.items():
        if name == "delete" and answered:
            continue  # whatever answers 200 counts: what is still there is found by the next listing
        faulty.fail(fault)
        with pytest.raises(StoreError, match=message) as caught:
            operation(store)
        assert not isinstance(caught.value, ObjectMissing), name
        faulty.heal()
    assert patient.get("key") == b"old" and patient.keys("") == ["key"]
    faulty.fail(fault)
    with pytest.raises(StoreUnavailable, match=message):
        store.check()


def test_endless_redirect_is_named_at_every_stack_depth(open_faulty: OpenS3, faulty: StoreFaults) -> None:
    """boto3 recurses until Python stops it, in its own code or in a request, which wraps that error."""
    store = open_faulty()
    faulty.fail(faults.ELSEWHERE)

    def at_depth(depth: int) -> None:
        if depth:
            at_depth(depth - 1)
        else:
            store.get("key")

    for depth in range(40):
        with pytest.raises(StoreError, match="is not an S3 server"):
            at_depth(depth)


def test_body_that_breaks_off_is_read_again(open_faulty: OpenS3, faulty: StoreFaults) -> None:
    store, data = open_faulty(), bytes(range(256)) * 400
    store.put("key", data)
    faulty.fail(faults.CUT_DOWNLOAD, "GET", times=2)
    assert store.get("key") == data
    for fault in (faults.CUT_DOWNLOAD, faults.ENDLESS):
        faulty.fail(fault, "GET")
        with pytest.raises(StoreError, match=r"reading key from .* broke off 12 times"):
            store.get("key")
    faulty.heal()
    assert store.get("key") == data


@pytest.mark.parametrize("server", ["rclone", "moto"])
def test_cut_off_upload_is_never_visible(s3_servers: Servers, open_s3: OpenS3, server: str) -> None:
    """moto keeps what was there; rclone, which writes in place, takes it away."""
    with closing(StoreFaults(s3_servers[server][0])) as proxy:
        store = open_s3(s3_servers[server], endpoint=proxy.url)
        store.put("key", b"old")
        proxy.fail(faults.CUT_UPLOAD, "PUT")
        for key in ("key", "new"):
            with pytest.raises(StoreError, match=f"put_object {key} on .* failed"):
                store.put(key, bytes(300_000))
        proxy.heal()
        left = ["key"] if server == "moto" else []
        eventually(lambda: store.keys("") == left)  # rclone sees a moment later that its client is gone
        for key in ("key", "new"):
            if (server, key) == ("moto", "key"):
                assert store.get(key) == b"old"
            else:
                with pytest.raises(ObjectMissing):
                    store.get(key)


def test_boto3_retries_within_bound_and_completes_lost_write(open_faulty: OpenS3, faulty: StoreFaults) -> None:
    store = open_faulty(retries=2)
    rule = faulty.fail(faults.SLOW_DOWN, "PUT", times=2)
    store.put("key", b"1")
    assert rule.met == 2
    rule = faulty.fail(faults.SLOW_DOWN, "PUT")
    with pytest.raises(StoreError, match="SlowDown"):
        store.put("key", b"2")
    assert rule.met == 3
    faulty.heal()
    rule = faulty.fail(faults.LOSE_ANSWER, "PUT", "key")
    with pytest.raises(StoreError, match=r"(?i)timeout"):
        open_faulty(timeout_seconds=3).put("key", b"3")
    faulty.heal()
    assert rule.met and store.get("key") == b"3", "it was done, though its answer was lost"


def test_bad_credentials_are_named_and_renewed_ones_are_read(
    s3_servers: Servers, unique_run_id: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    endpoint, access, secret = s3_servers["rclone"]
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    profile = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    store = open_store(Address(unique_run_id, "", f"s3://{BUCKET}", endpoint), minimal_config(store=QUICK))
    wrong = new_secret()
    operations: list[Callable[[], object]] = [store.check, lambda: store.put("key", b"1")]
    for key, said in ((None, "no credentials; set AWS_ACCESS_KEY_ID"), (wrong, "check AWS_ACCESS_KEY_ID")):
        if key:
            profile.write_text(f"[default]\naws_access_key_id = {access}\naws_secret_access_key = {key}\n")
        for operation in operations:
            with pytest.raises(StoreUnavailable, match=said) as caught:
                operation()
            assert wrong not in str(caught.value) and access not in str(caught.value)
    profile.write_text(profile.read_text().replace(wrong, secret))
    store.put("key", b"1")
    profile.unlink()
    assert store.get("key") == b"1", "credentials that work are kept"


# The folder


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """Of run `r`, below the test's folder."""
    return file_store(tmp_path)


def test_full_folder_is_named_and_keeps_old_object(store: ObjectStore, tmp_path: Path) -> None:
    store.put("a/object", b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(StoreError, match=r"writing a/object to .* failed"):
            store.put("a/object", bytes(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert store.get("a/object") == b"old"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["object"]


def test_file_in_place_of_folder_is_named(store: ObjectStore) -> None:
    store.put("checkpoints", b"a file")
    for key in ("checkpoints/x", "checkpoints/1/x"):
        with pytest.raises(StoreError, match=f"writing {key}"):
            store.put(key, b"1")
        with pytest.raises(ObjectMissing):
            store.get(key)
    assert store.keys("") == ["checkpoints"]


def test_folder_reader_sees_complete_objects_only(tmp_path: Path) -> None:
    store, reader = file_store(tmp_path), file_store(tmp_path)
    contents = [bytes([index]) * (200_000 + index) for index in range(3)]
    store.put("a/object", contents[0])

    def write() -> None:
        for index in range(60):
            store.put("a/object", contents[index % 3])
            store.put(f"a/new-{index % 5}", contents[index % 3])
            store.delete(f"a/new-{index % 5}")

    writing, seen = Background(write), set[str]()
    while writing.runs:
        assert reader.get("a/object") in contents
        seen |= set(reader.keys(""))
    writing.result()
    assert seen <= {"a/object", *(f"a/new-{index}" for index in range(5))}


def test_deletion_removes_leftovers_and_keeps_live_objects(tmp_path: Path) -> None:
    store, folder = file_store(tmp_path), tmp_path / "r" / "checkpoints"
    for name in ("1", "2"):
        store.put(f"checkpoints/{name}/manifest.json", b"1")
        store.put(f"checkpoints/{name}/default/policy", b"1")
        (folder / name / ".partial-a").write_bytes(b"half")
        (folder / name / "default" / ".partial-b").write_bytes(b"half")
    (folder / "3" / "default").mkdir(parents=True)
    (folder / "3" / "default" / ".partial-c").write_bytes(b"half")
    store.delete("checkpoints/1/manifest.json")
    assert store.keys("checkpoints/1/") == ["checkpoints/1/default/policy"]
    store.delete("checkpoints/1/default/policy")
    store.delete("checkpoints/3/manifest.json")  # an upload of which only a temporary name was ever written
    assert store.folders("checkpoints/") == ["2"]
    assert store.get("checkpoints/2/default/policy") == b"1"


def test_unmounted_folder_is_unavailable_and_not_created(tmp_path: Path) -> None:
    root = tmp_path / "mount"
    root.mkdir()
    store = file_store(root)
    store.put("key", b"old")
    root.rename(tmp_path / "elsewhere")
    for operation in (OPERATIONS | {"check": lambda store: store.check()}).values():
        with pytest.raises(StoreUnavailable, match=r"mount is not there; create it or correct store\.url"):
            operation(store)
    assert not root.exists()
    (tmp_path / "elsewhere").rename(root)
    assert store.get("key") == b"old"
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match=r"correct store\.url"):
        file_store(tmp_path / "file").check()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS])
def test_disk_errors_become_store_errors(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store.put("a/key", b"old")

    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:  # what no disk does on demand
        patch.setattr(os, "fsync", fail)
        patch.setattr(os, "scandir", fail)
        patch.setattr(os, "listdir", fail)  # by which Python 3.13 lists a folder
        patch.setattr(Path, "read_bytes", fail)
        full = code in (errno.ENOSPC, errno.EDQUOT)
        hint = rf"\): make room in the file system of {tmp_path}" if full else ""
        with pytest.raises(StoreError, match=rf"writing a/key to .* failed: .*{os.strerror(code)}{hint}$"):
            store.put("a/key", b"new")
        for operation in (lambda: store.get("a/key"), lambda: store.keys(""), lambda: store.delete("a/none")):
            with pytest.raises(StoreError, match=os.strerror(code)):
                operation()
    assert store.get("a/key") == b"old" and store.keys("") == ["a/key"]


def test_objects_get_the_permissions_of_ordinary_files(tmp_path: Path) -> None:
    file_store(tmp_path).put("object", b"1")
    (tmp_path / "ordinary").write_text("")
    assert (tmp_path / "r" / "object").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_key_cannot_leave_run_folder(tmp_path: Path) -> None:
    for key in ("../outside", "a/../../outside", "/tmp/outside"):
        with pytest.raises(StoreError, match="leaves the store folder"):
            file_store(tmp_path).put(key, b"1")


# A power failure


def test_embedded_server_syncs_objects_to_disk(
    tmp_path: Path, unique_run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object and the folders that name it: the server itself leaves it to the kernel."""
    data, keys, secret = tmp_path / "data", tmp_path / "keys.json", new_secret()
    keys.write_text(json.dumps({"s3_access_key": secret, "s3_secret_key": secret}))
    service = start_s3(data, tmp_path / "log", secret, secret)
    try:
        endpoint = f"http://127.0.0.1:{service.port}"
        address = Address(unique_run_id, "", f"s3://{BUCKET}", endpoint, str(keys), str(data))
        store, synced = open_store(address, minimal_config(store=QUICK)), list[str]()
        monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
        store.put("a/object", b"1")
        run = data / BUCKET / unique_run_id
        for name in ("a/object", "a", ""):
            assert str(run / name) in synced
        assert str(data / BUCKET) in synced and str(data) not in synced

        def fail(handle: int) -> None:
            raise OSError(errno.EIO, "the disk is broken")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(StoreError, match=r"a/object may not be on the disk of s3://.*: .*the disk is broken"):
            store.put("a/object", b"2")
    finally:
        service.stop()


def test_parent_folders_are_synced_up_to_the_store(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    store.put("a/b/object", b"1")
    assert synced[1:] == [str(tmp_path / name) for name in ("r/a/b", "r/a", "r", "")]
