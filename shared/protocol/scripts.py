"""The Lua scripts of `shared/protocol/lua`: each is one atomic step in Redis, and each is safe to send twice.

The head of a script declares what it includes, its keys and its arguments; it reads them as `keys.NAME` and
`args.NAME`. The last argument may take many values (`fields...`), and is a table then.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, Generic, TypeVar, cast

import redis

from stagecoach.shared.base.errors import RunNotFound
from stagecoach.shared.protocol.keys import RunKeys

INCARNATIONS_KEPT = 16
"""Incarnations kept per worker in the ledger and in `pushed`; no fragment is in flight for longer."""

_LUA = files("stagecoach.shared.protocol") / "lua"
NAMES = sorted(path.name.removesuffix(".lua") for path in _LUA.iterdir() if path.is_file())
_HEAD = re.compile(r"^--- @(include|keys|args) (.+)\n", re.MULTILINE)
Reply = TypeVar("Reply")


@dataclass(frozen=True)
class Source:
    """A script as Redis gets it, and the names of its KEYS and ARGV in their order."""

    text: str
    keys: tuple[str, ...]
    args: tuple[str, ...]
    many: str | None
    """The argument after `args` that takes all the others."""

    @cached_property
    def sha(self) -> str:
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


def unknown_run(client: redis.Redis, run_id: str) -> RunNotFound:
    """Returns the error for a run that does not exist; it reports evicted keys."""
    info: Any = {}
    with suppress(redis.RedisError):
        info = client.info("stats")
    if evicted := info.get("evicted_keys"):
        return RunNotFound(
            f"Redis knows no run {run_id!r}, and has evicted {evicted} keys since it started, perhaps the run's: set "
            f"maxmemory-policy noeviction there; `stagecoach resume` continues from the store"
        )
    return RunNotFound(f"Redis knows no run {run_id!r}; is this the Redis it was started on?")


@cache
def source(name: str) -> Source:
    """Returns the script `NAME.lua`: its names, then its includes, then its body."""
    body = (_LUA / f"{name}.lua").read_text()
    head: dict[str, list[str]] = {kind: names.split(", ") for kind, names in _HEAD.findall(body)}
    keys, args, many = head["keys"], head.get("args", []), None
    fields = [f"{name} = ARGV[{index}]" for index, name in enumerate(args, 1) if not name.endswith("...")]
    rest = ""
    if args and args[-1].endswith("..."):
        many = args.pop().removesuffix("...")
        fields.append(f"{many} = {{}}")  # filled one by one, since unpack takes only some thousands
        rest = f"for i = {len(args) + 1}, #ARGV do args.{many}[i - {len(args)}] = ARGV[i] end\n"
    names = ", ".join(f"{name} = KEYS[{index}]" for index, name in enumerate(keys, 1))
    included = "".join((_LUA / "include" / f"{name}.lua").read_text() for name in head.get("include", []))
    text = f"local keys = {{{names}}}\nlocal args = {{{', '.join(fields)}}}\n{rest}{included}{body}"
    return Source(text, tuple(keys), tuple(args), many)


for _name in NAMES:  # all now: later this process may open no file more
    source(_name)


class Script:
    def __init__(self, client: redis.Redis, keys: RunKeys, name: str) -> None:
        self.client, self._keys, self._source = client, keys, source(name)
        self.sha = self._source.sha

    def __call__(self, **named: Any) -> Any:
        """Runs the script with these arguments, and with the key of each kind that a run has several of."""
        return self.run(self.arguments(**named))

    def arguments(self, **named: Any) -> list[Any]:
        """Returns the number of keys, the keys, the arguments; raises `TypeError` for missing or extra names."""
        wanted, values = self._source, dict(named)
        try:
            keys = [values.pop(name) if name in values else getattr(self._keys, name) for name in wanted.keys]
            args = [values.pop(name) for name in wanted.args]
            many = values.pop(wanted.many) if wanted.many else ()
        except KeyError as error:
            raise TypeError(f"the script lacks its argument {error}; expected {wanted.args} {wanted.many}") from None
        if values:
            raise TypeError(f"the script has no argument {', '.join(values)}; expected {wanted.args} {wanted.many}")
        return [len(keys), *keys, *args, *many]

    def run(self, arguments: list[Any]) -> Any:
        """Runs the script by its hash, or by its text on a server that does not have it (after a failover). Raises
        `RunNotFound`."""
        try:
            try:
                return self.client.evalsha(self.sha, *arguments)
            except redis.exceptions.NoScriptError:
                return self.client.eval(self._source.text, *arguments)
        except redis.ResponseError as error:
            if "NORUN" in str(error):
                raise unknown_run(self.client, self._keys.run_id) from None
            raise


@dataclass
class Call(Generic[Reply]):
    """One prepared run of a script, to be sent alone or in one round trip with another."""

    script: Script
    arguments: list[Any]
    read: Callable[[Any], Reply]
    """Parser of the reply."""
    reply: Reply | None = None

    def run(self, then: Call[Any] | None = None) -> Reply:
        """Runs alone, or with `then` after it in one round trip; other clients may come in between. If one of the two
        fails, each is sent again alone: so a server without the script gets it, and a damaged key is named."""
        calls: list[Call[Any]] = [self] if then is None else [self, then]
        replies: list[Any] = []
        if then is not None:
            pipeline = self.script.client.pipeline(transaction=False)
            for call in calls:
                pipeline.evalsha(call.script.sha, *call.arguments)
            with suppress(redis.ResponseError):
                replies = pipeline.execute()
        for call, reply in zip(calls, replies or [call.script.run(call.arguments) for call in calls], strict=True):
            call.reply = call.read(reply)
        return cast(Reply, self.reply)


def read_stream(client: redis.Redis, key: str, after: str, count: int | None, block_seconds: float) -> list[Any]:
    """Returns id and fields of up to `count` entries after one, waiting at most `block_seconds` for the first."""
    return stream_page(client.xread({key: after}, count=count, block=block_milliseconds(block_seconds)))


def block_milliseconds(seconds: float) -> int | None:
    """Returns the argument of a read that waits for at most `seconds`; None if it does not wait."""
    return max(1, int(seconds * 1000)) if seconds > 0 else None


def stream_page(found: Any) -> list[Any]:
    """Returns id and fields of the entries in Redis's reply to a read of one stream."""
    if isinstance(found, dict):  # RESP 3
        return list(next(iter(found.values()))[0]) if found else []
    return list(found[0][1]) if found else []


def write_small(client: redis.Redis, keys: RunKeys, key: str, command: str, *arguments: str | int) -> Any:
    """Writes a few bytes to one of the run's keys, also when the memory of Redis is full."""
    return Script(client, keys, "write")(key=key, command=command, arguments=arguments)
