#!/usr/bin/env python3
"""Writes a Redis ACL file from deploy/users.acl, with each role's password from the environment or from files."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
from pathlib import Path

SHORTEST = 16
EVERY_RUN = "{*}"
"""The run's id in the pattern of a key."""


def password_of(user: str) -> str | None:
    variable = f"STAGECOACH_{user.upper()}_REDIS_PASSWORD"
    password, path = os.environ.get(variable), os.environ.get(f"{variable}_FILE")
    if not password and path:
        password = next(iter(Path(path).read_text().splitlines()), None)
    return password or None


def filled(text: str, runs: str) -> str:
    """The ACL file with a hash for each user whose password is there; raises `ValueError`."""
    lines, without = [], []
    for line in text.splitlines():
        user = line.split()[1]
        password = password_of(user) if user != "default" else None
        if password is None and user != "default":
            without.append(user)
        if password is not None and len(password) < SHORTEST:
            raise ValueError(f"the password of {user} has fewer than {SHORTEST} characters; its hash could be guessed")
        secret = f"#{hashlib.sha256(password.encode()).hexdigest()}" if password else "resetpass"
        lines.append(line.replace("resetpass", secret).replace(EVERY_RUN, f"{{{runs}}}"))
    if without:
        print(f"no password, so no login is possible for: {', '.join(without)}", file=sys.stderr)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print users.acl with password hashes (from the environment).")
    runs_help = "only runs whose id matches this pattern, e.g. 'team-a-*'"
    parser.add_argument("--runs", default="*", metavar="PATTERN", help=runs_help)
    runs = parser.parse_args().runs
    if not re.fullmatch(r"[A-Za-z0-9._*-]+", runs):
        sys.exit(f"Error: --runs {runs!r}: expected letters, digits, '.', '_', '-' and '*'")
    try:
        print(filled((Path(__file__).parent / "users.acl").read_text(), runs))
    except (OSError, ValueError) as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
