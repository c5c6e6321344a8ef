"""A real Redis or Valkey with deploy/redis.conf and deploy/users.acl, and a password of its own for each role."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from stagecoach.coordinator.services.embedded import free_port, new_secret
from stagecoach.coordinator.services.redis_servers import redis_binary
from stagecoach.shared.base.address import RoleName
from tests.support.services.certificate_authority import Authority
from tests.support.services.own_redis import wait_ready

DEPLOY = Path(__file__).parents[3] / "deploy"
ROLES: tuple[RoleName, ...] = get_args(RoleName)
ADMIN = "admin-of-the-test"


@dataclass(frozen=True)
class AclServer:
    """A running server and what its users say to come in."""

    port: int
    passwords: Mapping[RoleName, str]
    admin_password: str
    ca_file: Path | None = None
    """Issuer of its certificate if it speaks TLS."""

    @property
    def url(self) -> str:
        """Address without credentials."""
        return f"{'rediss' if self.ca_file else 'redis'}://127.0.0.1:{self.port}/0"

    def client(self, user: str) -> redis.Redis:
        password = self.admin_password if user == ADMIN else dict(self.passwords)[user]  # type: ignore[index]
        return redis.Redis(
            host="127.0.0.1", port=self.port, username=user, password=password, socket_timeout=5, driver_info=None,
            retry=Retry(NoBackoff(), 0), ssl=self.ca_file is not None,
            ssl_ca_certs=str(self.ca_file) if self.ca_file else None,
        )  # fmt: skip

    def variables(self, *roles: RoleName) -> dict[str, str]:
        return {f"STAGECOACH_{role.upper()}_REDIS_PASSWORD": self.passwords[role] for role in roles}

    def refusals(self) -> list[str]:
        """`user: what` of everything that the server has refused so far."""
        with self.client(ADMIN) as client:
            log: Any = client.acl_log()
        return [f"{_text(entry['username'])}: {_text(entry['reason'])} {_text(entry['object'])}" for entry in log]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def filled_acl(passwords: Mapping[RoleName, str], *arguments: str) -> str:
    variables = {f"STAGECOACH_{role.upper()}_REDIS_PASSWORD": password for role, password in passwords.items()}
    made = subprocess.run(
        [sys.executable, str(DEPLOY / "make_acl.py"), *arguments], env={"PATH": os.environ["PATH"], **variables},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return made.stdout


@contextmanager
def acl_server(folder: Path, *arguments: str, authority: Authority | None = None) -> Iterator[AclServer]:
    """Starts it with the shipped files, over TLS with an `authority`; only port and folders are other ones."""
    folder.mkdir(parents=True, exist_ok=True)
    passwords = {role: new_secret() for role in ROLES}
    server = AclServer(free_port(), passwords, new_secret(), authority.ca_file if authority else None)
    admin = f"user {ADMIN} on >{server.admin_password} ~* &* +@all\n"
    (folder / "users.acl").write_text(filled_acl(server.passwords, *arguments) + admin)
    here = {"port": str(server.port), "dir": str(folder), "aclfile": str(folder / "users.acl"), "maxmemory": "200mb"}
    text = (DEPLOY / "redis.conf").read_text()
    if authority is not None:
        text = re.sub(r"^#(port 0|tls-)", r"\1", text, flags=re.MULTILINE)
        made = authority.certificate("127.0.0.1")
        here |= {"port": "0", "tls-port": str(server.port), "tls-cert-file": str(made.cert_file)}
        here |= {"tls-key-file": str(made.key_file), "tls-ca-cert-file": str(authority.ca_file)}
    here["logfile"] = str(folder / "redis.log")
    lines = [line for line in text.splitlines() if line.partition(" ")[0] not in here]
    lines += [f"{name} {value}" for name, value in here.items()]
    (folder / "redis.conf").write_text("\n".join(lines) + "\n")
    process = subprocess.Popen([redis_binary(), str(folder / "redis.conf")], stdout=subprocess.DEVNULL)
    try:
        wait_ready(lambda: server.client(ADMIN), folder / "redis.log", lambda: process.poll() is None)
        yield server
    finally:
        process.terminate()
        process.wait(30)
