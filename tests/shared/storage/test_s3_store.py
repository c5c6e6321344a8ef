"""What an S3 store refuses, in its own words; and that the shipped policy has the rights that a run needs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest

from stagecoach.coordinator.diagnostics.store_trial import try_store
from stagecoach.coordinator.lifecycle.doctor import examine
from stagecoach.coordinator.lifecycle.validation import check_services
from stagecoach.coordinator.services.embedded import BUCKET, free_port
from stagecoach.shared.base.address import Address
from stagecoach.shared.base.errors import (
    CredentialsRefused,
    DeletionRefused,
    OperationRefused,
    StoreError,
    StoreUnavailable,
)
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.storage import s3_store
from stagecoach.shared.storage.object_store import ObjectStore, open_store
from tests.conftest import minimal_config
from tests.support.processes.waiting import eventually
from tests.support.services import store_faults as faults
from tests.support.services.store_faults import Answer, Fault, StoreFaults

POLICY = Path(__file__).parents[3] / "deploy" / "store-policy.json"
Servers = dict[str, tuple[str, str, str]]
ACTIONS: dict[str, Callable[[ObjectStore], object]] = {
    "s3:GetObject": lambda store: store.get("key"),
    "s3:PutObject": lambda store: store.put("key", b"new"),
    "s3:ListBucket": lambda store: store.keys(""),
    "s3:DeleteObject": lambda store: store.delete("key"),
}


@pytest.fixture
def proxy(s3_servers: Servers, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreFaults]:
    """A fault proxy before rclone, whose keys are in the environment."""
    endpoint, access, secret = s3_servers["rclone"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", access)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    with closing(StoreFaults(endpoint)) as proxy:
        yield proxy


def config_of(endpoint: str, **store: Any) -> Config:
    url = f"s3://{BUCKET}/rights"
    return minimal_config(store={"url": url, "endpoint_url": endpoint, "retries": 0, **store})


def store_of(endpoint: str, **store: Any) -> ObjectStore:
    config = config_of(endpoint, **store)
    return open_store(Address("a-run", "", config.store.url, endpoint), config)


@pytest.mark.parametrize("right", ACTIONS)
def test_access_denied_names_the_missing_right(proxy: StoreFaults, right: str) -> None:
    proxy.fail(faults.refusal(403, "AccessDenied", "Access Denied by a policy"))
    with pytest.raises(
        OperationRefused, match=rf"AccessDenied \(HTTP 403\): Access Denied by a policy.*{right}"
    ) as told:
        ACTIONS[right](store_of(proxy.url))
    assert isinstance(told.value, DeletionRefused) == (right == "s3:DeleteObject")
    assert not isinstance(told.value, CredentialsRefused) and "AWS_ACCESS_KEY_ID" not in str(told.value)


XML = (("Content-Type", "application/xml"),)
NOT_CREDENTIALS: list[tuple[Fault, str]] = [
    (faults.refusal(403, "QuotaExceeded", "the bucket is full"), r"QuotaExceeded \(HTTP 403\): the bucket is full"),
    (faults.refusal(403, "ObjectLocked", "held until 2030"), r"ObjectLocked \(HTTP 403\): held until 2030"),
    (faults.refusal(400, "XMinioAdminBucketQuotaExceeded", ""), r"XMinioAdminBucketQuotaExceeded \(HTTP 400\)$"),
    (Answer(403, b"", ()), r"put_object key on .* HTTP 403"),
    (Answer(403, b"<Error><Code></Code><Message></Message></Error>", XML), r"put_object key on .* HTTP 403"),
    (Answer(400, b"<Error><Code/><Message/></Error>", XML), r"put_object key on .* HTTP 400"),
    (Answer(507, b"<Error/>", XML), r"put_object key on .* HTTP 507"),
]


@pytest.mark.parametrize(("fault", "words"), NOT_CREDENTIALS, ids=range(len(NOT_CREDENTIALS)))
def test_other_refusals_quote_code_and_status(proxy: StoreFaults, fault: Fault, words: str) -> None:
    proxy.fail(fault)
    with pytest.raises((StoreError, StoreUnavailable), match=words) as told:
        store_of(proxy.url).put("key", b"1")
    assert not isinstance(told.value, CredentialsRefused) and "check AWS_ACCESS_KEY_ID" not in str(told.value)


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "SecondLevelDomainForbidden", "It must be addressed using OSS third level domain."),
        (400, "PathStyleDomainForbidden", "Path-style is not supported, please use virtual hosted style."),
    ],
)  # fmt: skip
def test_refused_path_style_names_the_field(proxy: StoreFaults, status: int, code: str, message: str) -> None:
    proxy.fail(faults.refusal(status, code, message))
    with pytest.raises(OperationRefused, match=r"set store\.addressing_style=virtual"):
        store_of(proxy.url).check()


@pytest.mark.parametrize(("style", "first"), [("auto", f"/{BUCKET}?"), ("path", f"/{BUCKET}?"), ("virtual", "/?")])
def test_addressing_style_says_where_the_bucket_is_named(
    proxy: StoreFaults, monkeypatch: pytest.MonkeyPatch, style: str, first: str
) -> None:
    """Names below `localhost` are this machine's, whatever its resolver says."""
    resolve, asked = socket.getaddrinfo, list[str]()

    def here(host: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(str(host))
        return resolve("127.0.0.1", *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", here)
    proxy.fail(faults.refusal(404, "NoSuchKey"))
    store = store_of(proxy.url.replace("127.0.0.1", "localhost"), addressing_style=style)
    with pytest.raises((StoreError, StoreUnavailable)):
        store.check()
    assert proxy.seen[0].startswith(f"GET {first}")
    named = [host for host in asked if host.endswith("localhost")]  # another thread may look up addresses too
    assert named[0] == (f"{BUCKET}.localhost" if style == "virtual" else "localhost")


def test_uploads_carry_the_checksum_of_locked_buckets(proxy: StoreFaults) -> None:
    words = "Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object requests with Object Lock parameters"
    refused = proxy.fail(faults.refusal(400, "InvalidRequest", words), "PUT", lacks="Content-MD5")
    store = store_of(proxy.url)
    for data in (b"", b"1", bytes(100_000)):
        store.put("key", data)
        assert store.get("key") == data
    assert not refused.met


def test_doctor_and_start_try_each_right(proxy: StoreFaults, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(proxy.url).model_copy(update={"runs_dir": tmp_path})

    def found() -> dict[str, str]:
        return {item.name: f"{item.outcome} {item.text}" for item in examine(config) if "store" in item.name}

    for method, key, right in (
        ("PUT", "", "s3:PutObject"),
        ("GET", "/probe", "s3:GetObject"),
        ("GET", "list", "s3:ListBucket"),
    ):
        proxy.fail(faults.refusal(403, "AccessDenied"), method, key)
        with pytest.raises(OperationRefused, match=right):
            check_services(config)
    told = found()
    assert told["store"].startswith("fail ") and "s3:ListBucket" in told["store"]
    proxy.fail(faults.refusal(403, "AccessDenied"), "DELETE")
    check_services(config)
    assert "s3:DeleteObject" in caplog.text and "keeps all its checkpoints" in caplog.text
    told = found()
    assert told["store"].startswith("ok ") and told["access to store"].startswith("ok ")
    assert told["deletion in the store"].startswith("warn ") and "s3:DeleteObject" in told["deletion in the store"]
    proxy.heal()
    assert "deletion in the store" not in found()


def test_policy_file_has_the_right_of_each_operation() -> None:
    statements = json.loads(POLICY.read_text())["Statement"]
    allowed = {action for statement in statements for action in statement["Action"]}
    source = Path(s3_store.__file__).read_text()
    operations = {name for name in dir(boto3.client("s3", "us-east-1")) if f'_call("{name}"' in source}
    assert allowed == {s3_store.RIGHTS[operation] for operation in operations} == {*ACTIONS}


@contextmanager
def moto_with_users(folder: Path) -> Iterator[tuple[str, Callable[[dict[str, Any]], dict[str, str]]]]:
    """An S3 server that enforces policies: its endpoint, and what makes a key with a policy."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (folder / "moto.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "MOTO_PORT": str(port)})
    endpoint = f"http://127.0.0.1:{port}"
    root = {
        "endpoint_url": endpoint,
        "region_name": "us-east-1",
        "aws_access_key_id": "a",
        "aws_secret_access_key": "b",
    }

    client: Any = boto3.client

    def enforce(after: str) -> None:
        headers, place = {"Content-Type": "text/plain"}, f"{endpoint}/moto-api/reset-auth"
        urllib.request.urlopen(urllib.request.Request(place, after.encode(), headers)).close()

    def key_with(policy: dict[str, Any]) -> dict[str, str]:
        enforce("1000")
        iam, name = client("iam", **root), f"user-{len(made)}"
        made.append(name)
        iam.create_user(UserName=name)
        iam.put_user_policy(UserName=name, PolicyName="store", PolicyDocument=json.dumps(policy))
        key = iam.create_access_key(UserName=name)["AccessKey"]
        enforce("0")
        return {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}

    made: list[str] = []

    def answers() -> bool:
        try:
            client("s3", **root).create_bucket(Bucket="my-bucket")
        except Exception:
            return False
        return True

    try:
        eventually(answers)
        yield endpoint, key_with
    finally:
        process.terminate()
        process.wait(30)


def test_policy_file_suffices_and_each_right_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a server that enforces IAM policies."""
    policy = json.loads(POLICY.read_text())
    with moto_with_users(tmp_path) as (endpoint, key_with):

        def store(policy: dict[str, Any]) -> ObjectStore:
            for name, value in key_with(policy).items():
                monkeypatch.setenv(name, value)
            config = minimal_config(store={"url": "s3://my-bucket/team", "endpoint_url": endpoint, "retries": 0})
            return open_store(Address("a-run", "", config.store.url, endpoint), config)

        assert try_store(store(policy)) is None
        for right in ACTIONS:
            less = json.loads(json.dumps(policy).replace(f'"{right}"', '"s3:GetBucketTagging"'))
            without = store(less)
            if right == "s3:DeleteObject":
                assert f"right {right}" in str(try_store(without))
            else:
                with pytest.raises(OperationRefused, match=f"right {right}"):
                    try_store(without)
