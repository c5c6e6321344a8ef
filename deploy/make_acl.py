#!/usr/bin/env python3
"""Prints `users.acl` with password hashes in it, for the `aclfile` of Redis or Valkey.

    python deploy/make_acl.py [--runs PATTERN] > /etc/redis/users.acl

Each password comes from the variable that its role uses as well: STAGECOACH_WORKER_REDIS_PASSWORD, and so on for
EVALUATOR, TRAINER, COORDINATOR and VIEWER; or from the file that STAGECOACH_…_PASSWORD_FILE names. A user without a
password stays one that nobody can be. Only SHA-256 hashes are printed, so make the passwords long and random, since
short ones can be found from their hashes: `openssl rand -hex 32` makes one. Needs nothing but Python.

`--runs 'team-a-*'` limits all users to the keys of runs with such an id.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
from pathlib import Path

SHORTEST = 16
EVERY_RUN = "stagecoach:{*}:"


def password_of(user: str) -> str | None:
    """From the environment, or the file that it names."""
    variable = f"STAGECOACH_{user.upper()}_REDIS_PASSWORD"
    path = os.environ.get(f"{variable}_FILE")
    if not os.environ.get(variable) and path:
        lines = Path(path).read_text().splitlines()
        return lines[0] if lines else None
    return os.environ.get(variable) or None


def filled(text: str, runs: str) -> str:
    """The ACL file with a hash for each user whose password is there; raises `ValueError`."""
    lines, without = [], []
    for line in text.splitlines():
        user, password = line.split()[1], None
        if user != "default":
            password = password_of(user)
            if password is None:
                without.append(user)
            elif len(password) < SHORTEST:
                raise ValueError(
                    f"the password of {user} has fewer than {SHORTEST} characters; its hash could be guessed"
                )
        secret = f"#{hashlib.sha256(password.encode()).hexdigest()}" if password else "resetpass"
        lines.append(line.replace("resetpass", secret).replace(EVERY_RUN, f"stagecoach:{{{runs}}}:"))
    if without:
        print(f"no password, so nobody can be: {', '.join(without)}", file=sys.stderr)
    return "\n".join(lines)


def main() -> None:
    """Reads the environment, prints the file."""
    parser = argparse.ArgumentParser(description="Print users.acl with password hashes (from the environment).")
    parser.add_argument(
        "--runs", default="*", metavar="PATTERN", help="only runs whose id is like this, e.g. 'team-a-*'"
    )
    runs = parser.parse_args().runs
    if not re.fullmatch(r"[A-Za-z0-9._*-]+", runs):
        sys.exit(f"Error: --runs {runs!r}: expected letters, digits, '.', '_', '-' and '*'")
    try:
        print(filled((Path(__file__).parent / "users.acl").read_text(), runs))
    except (OSError, ValueError) as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
