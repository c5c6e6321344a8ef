"""TLS to Redis and to the store, with real certificates: what is trusted works, and whatever is not is refused before
any secret is sent, in one line that says what was found and what to do.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stagecoach.coordinator.services.embedded import BUCKET, new_secret
from stagecoach.shared.base.address import Address
from stagecoach.shared.base.errors import ConfigError, RedisUnavailable, StoreUnavailable
from stagecoach.shared.config.loading import dump_config
from stagecoach.shared.protocol.redis_client import connect_redis
from stagecoach.shared.runtime.launch import launch_from_arguments, role_arguments
from stagecoach.shared.storage.object_store import ObjectStore, open_store
from tests.conftest import RedisServer, minimal_config
from tests.support.services.certificate_authority import Authority, tls_before

Connect = Callable[..., None]
OpenStore = Callable[..., ObjectStore]
Servers = dict[str, tuple[str, str, str]]
KEY = new_secret()


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("strangers"))


@pytest.fixture
def connect(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Connect:
    """`connect(port, ca_file=…)`: over TLS, with the server's password; answers nothing, raises what is wrong."""
    monkeypatch.setenv("STAGECOACH_REDIS_PASSWORD", redis_server.password)

    def connect_(port: int, scheme: str = "rediss", host: str = "127.0.0.1", **tls: Any) -> None:
        url = f"{scheme}://{host}:{port}"
        config = minimal_config(redis={"url": url, "timeout_seconds": 10, "retry_seconds": 0, **tls})
        with connect_redis(Address("run", url, ""), config) as client:
            assert client.ping()

    return connect_


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def refused(call: Callable[[], object], *words: str) -> None:
    """Holds that `call` is refused in one line with these words, and without any secret."""
    with pytest.raises((RedisUnavailable, StoreUnavailable)) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line
    secrets = [os.environ.get(name) for name in ("STAGECOACH_REDIS_PASSWORD", "AWS_SECRET_ACCESS_KEY")]
    assert not any(secret in line for secret in secrets if secret)
    for word in words:
        assert word in line


def test_redis_over_tls_by_named_or_system_authority(
    redis_server: RedisServer, ours: Authority, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tls_before(port_of(redis_server.url), ours.certificate("127.0.0.1", "localhost")) as port:
        connect(port, ca_file=str(ours.ca_file))
        connect(port, host="localhost", ca_file=str(ours.ca_file))
        monkeypatch.setenv("SSL_CERT_FILE", str(ours.ca_file))
        connect(port)


def test_redis_with_untrusted_certificate_is_refused(
    redis_server: RedisServer, ours: Authority, strangers: Authority, connect: Connect
) -> None:
    plain, ca_file = port_of(redis_server.url), str(ours.ca_file)
    with tls_before(plain, strangers.certificate("127.0.0.1")) as port:
        refused(lambda: connect(port, ca_file=ca_file), "no authority that this machine knows", "redis.ca_file")
        refused(lambda: connect(port), "no authority that this machine knows", "local issuer", "redis.ca_file")
    with tls_before(plain, ours.certificate("redis.example")) as port:
        refused(lambda: connect(port, ca_file=ca_file), "for another name", "not valid for '127.0.0.1'", "redis.url")
    with tls_before(plain, ours.certificate("127.0.0.1", expired=True)) as port:
        refused(lambda: connect(port, ca_file=ca_file), "has expired", "renew it")


def test_tls_on_one_end_only_is_explained(redis_server: RedisServer, ours: Authority, connect: Connect) -> None:
    plain = port_of(redis_server.url)
    refused(lambda: connect(plain, ca_file=str(ours.ca_file), timeout_seconds=2), "does not speak TLS", "redis://")
    with tls_before(plain, ours.certificate("127.0.0.1")) as port:
        refused(lambda: connect(port, scheme="redis"), "speaks TLS", "rediss://")


def test_redis_that_requires_client_certificate(redis_server: RedisServer, ours: Authority, connect: Connect) -> None:
    client, ca_file = ours.certificate("client"), str(ours.ca_file)
    with tls_before(port_of(redis_server.url), ours.certificate("127.0.0.1"), clients_ca=ours.ca_file) as port:
        connect(port, ca_file=ca_file, cert_file=str(client.cert_file), key_file=str(client.key_file))
        refused(lambda: connect(port, ca_file=ca_file), "redis.cert_file")


def test_missing_or_invalid_certificate_files_are_named(ours: Authority, connect: Connect) -> None:
    client, other = ours.certificate("client"), ours.certificate("other")
    cert, key = str(client.cert_file), str(client.key_file)
    refused(lambda: connect(1, ca_file="/no/such/ca.crt"), "redis.ca_file=/no/such/ca.crt", "No such file")
    refused(lambda: connect(1, ca_file=key), "redis.ca_file", "holds no certificate")
    refused(lambda: connect(1, cert_file=cert, key_file=str(other.key_file)), "redis.cert_file", "key_file")


@pytest.mark.parametrize(
    "query", ["ssl_cert_reqs=none", "ssl_cert_reqs=", "ssl_check_hostname=false", "db=1&ssl_ca_certs=/tmp/ca.crt"]
)
def test_url_cannot_disable_verification(query: str, tmp_path: Path) -> None:
    url = f"rediss://127.0.0.1:1/?{query}"
    with pytest.raises(ConfigError, match=r"redis\.url sets ssl_.* always verified") as caught:
        minimal_config(redis={"url": url})
    assert "redis.ca_file" in str(caught.value) and "\n" not in str(caught.value)
    refused(lambda: connect_redis(Address("run", url, ""), minimal_config()), "always verified")
    (tmp_path / "config.yaml").write_text(dump_config(minimal_config()))
    words = ["run", "--redis", url, "--store", "file:///x", "--config", str(tmp_path / "config.yaml")]
    with pytest.raises(ConfigError, match="always verified"):
        launch_from_arguments(role_arguments("stagecoach.trainer_node", "").parse_args(words))


def test_role_command_line_rejects_password(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_config(minimal_config()))
    words = ["run", "--redis", f"redis://:{KEY}@127.0.0.1:1", "--store", "file:///x"]
    with pytest.raises(ConfigError, match="holds credentials") as caught:
        launch_from_arguments(
            role_arguments("stagecoach.trainer_node", "").parse_args(
                [*words, "--config", str(tmp_path / "config.yaml")]
            )
        )
    assert KEY not in str(caught.value)


@pytest.fixture
def store(s3_servers: Servers, monkeypatch: pytest.MonkeyPatch) -> OpenStore:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_servers["rclone"][1])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_servers["rclone"][2])
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)

    def store_(port: int, scheme: str = "https", **tls: Any) -> ObjectStore:
        url, endpoint = f"s3://{BUCKET}", f"{scheme}://127.0.0.1:{port}"
        config = minimal_config(store={"url": url, "endpoint_url": endpoint, "retries": 0, **tls})
        return open_store(Address("run", "", url, endpoint), config)

    return store_


def test_store_over_tls(
    s3_servers: Servers, ours: Authority, store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, ca_file = port_of(s3_servers["rclone"][0]), str(ours.ca_file)
    with tls_before(plain, ours.certificate("127.0.0.1")) as port:
        trusted = store(port, ca_file=ca_file)
        trusted.check()
        trusted.put("a", b"over tls")
        refused(store(port).check, "no authority that this machine knows", "store.ca_file")
        refused(store(port, scheme="http").check, "speaks TLS", "https://")
        refused(store(port, ca_file="/no/such.crt").check, "store.ca_file=/no/such.crt", "No such file")
        monkeypatch.setenv("AWS_CA_BUNDLE", ca_file)
        assert store(port).get("a") == b"over tls"
    with tls_before(plain, ours.certificate("s3.example")) as port:
        refused(store(port, ca_file=ca_file).check, "for another name", "s3.example", "store.endpoint_url")
    with tls_before(plain, ours.certificate("127.0.0.1", expired=True)) as port:
        refused(store(port, ca_file=ca_file).check, "has expired", "renew it")
    refused(store(plain, ca_file=ca_file).check, "does not speak TLS", "http://")


def test_untrusted_server_receives_no_secret(ours: Authority, connect: Connect) -> None:
    """What a server that cannot be trusted is sent is a handshake, and a PING for the look at it."""
    heard = bytearray()

    def listen() -> None:
        with suppress(OSError):
            while True:
                with listener.accept()[0] as connection:
                    connection.settimeout(10)
                    heard.extend(connection.recv(65536))
                    connection.sendall(b"-ERR what is that\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=listen)
        thread.start()
        refused(lambda: connect(listener.getsockname()[1], ca_file=str(ours.ca_file)), "does not speak TLS")
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(20)
    assert heard
    assert os.environ["STAGECOACH_REDIS_PASSWORD"].encode() not in heard
    assert b"AUTH" not in heard
