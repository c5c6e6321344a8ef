"""A Redis key of the run's that holds what Stagecoach never wrote: one error that names it, wherever it is met.

Redis says only that a type is wrong, or that a script met no number. This client looks which key it was.
"""

from __future__ import annotations

import re
from typing import Any

import redis

from shared.errors import UserError
from shared.flow_state import parse_flow
from shared.printable import printable
from shared.redis_keys import COUNTS, key_name, key_type

_GARBAGE = re.compile(r"WRONGTYPE|user_script|not an integer|no hash table|not a valid float")
"""How Redis tells that a key has another type, or a script of ours that it met no number."""
_FULL = "exhausted the last possible ID"
"""Of a stream with an entry at the greatest position that there is."""
_NUMBER = re.compile(rb"-?[0-9]{1,18}")


class KeyDamaged(UserError, redis.ResponseError):
    """A key holds what Stagecoach never wrote. Whoever bears that Redis refuses something bears this, too."""

    def __init__(self, key: str, what: object) -> None:
        super().__init__(
            f"the Redis key {key} is damaged: {printable(str(what), 300)}; somebody else wrote it. End the run, "
            f"delete all its keys (with redis.url=embedded: the folder `redis` in the run's folder), and "
            f"`stagecoach resume` continues it from its newest checkpoint"
        )


class NamingRedis(redis.Redis):
    """A client that says which key it was."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """As any client; raises `KeyDamaged` where a key of the run's holds garbage."""
        try:
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except redis.ResponseError as error:
            keys = [arg for arg in args[1:] if isinstance(arg, str) and key_name(arg)]
            if _FULL in str(error):
                raise KeyDamaged(" or ".join(key for key in keys if key_type(key) == "stream"), error) from None
            if not keys or not _GARBAGE.search(str(error)):
                raise
            for key in keys:
                if what := self._damage(key):
                    raise KeyDamaged(key, what) from None
            if len(keys) == 1 or "WRONGTYPE" in str(error):
                raise KeyDamaged(" or ".join(keys), error) from None
            raise

    def _damage(self, key: str) -> str | None:
        """What is wrong with it; None where nothing is, or where this client may not look."""
        try:
            found, expected = self._ask("TYPE", key).decode(), key_type(key)
            if found not in (expected, "none"):
                return f"expected a {expected}, found a {found}"
            if key_name(key) == "flow" and (raw := self._ask("HGETALL", key)):
                parse_flow(raw)
            if key_name(key) in COUNTS:
                odd = [pair for pair in self._ask("HGETALL", key).items() if not _NUMBER.fullmatch(pair[1])]
                return f"its field {odd[0][0]!r} is {odd[0][1][:40]!r} (expected a number)" if odd else None
        except redis.RedisError:
            return None
        except ValueError as error:
            return str(error)
        return None

    def _ask(self, command: str, key: str) -> Any:
        return super().execute_command(command, key)  # type: ignore[no-untyped-call]
