"""The simulated Redis beside a real server: the same commands of a walk, the same replies, and the same contents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis

from stagecoach.shared.protocol.scripts import NAMES, source
from tests.simulation.faults import Faults
from tests.simulation.redis_model import RedisModel, Refused, Scores, Stream
from tests.simulation.run import simulated
from tests.simulation.walk import Plan
from tests.support.services.own_redis import OwnRedis

_TEXTS = {source(name).sha.encode(): source(name).text for name in NAMES}
_CUT = (b"wakeups", b"events", b"metrics")
"""Streams that `MAXLEN ~` cuts where a server's nodes end."""
_HEAD = """
local ids, used, called, tried = {{{ids}}}, 0, redis.call, redis.pcall
local function fixed(call, ...)
  local args = {{...}}
  if args[1] == 'TIME' then return {{'{seconds}', '{micros}'}} end
  if args[1] == 'INFO' then return 'run_id:{run_id}' end
  for i = 1, args[1] == 'XADD' and #args or 0 do
    if args[i] == '*' then used = used + 1; args[i] = ids[used]; break end
  end
  return call(unpack(args))
end
local redis = {{
  call = function(...) return fixed(called, ...) end, pcall = function(...) return fixed(tried, ...) end,
  error_reply = redis.error_reply,
}}
"""
"""Puts time, server and new ids of the model in the place of the real server's."""


@dataclass
class Said:
    """A command, and what the model answered."""

    command: list[bytes]
    micros: int
    reply: Any = None
    ids: list[bytes] = field(default_factory=list)
    """New ids of streams, in the order in which they were given."""


def record(model: RedisModel, said: list[Said]) -> None:
    call = model.call

    def recorded(*command: bytes) -> Any:
        outer = not model._inside
        if outer:
            said.append(Said(list(command), round(model.now() * 1e6)))
        try:
            reply = call(*command)
        except Refused as error:
            reply = error
        if command[0] == b"XADD" and b"*" in command and not isinstance(reply, Refused):
            said[-1].ids.append(reply)
        if outer:
            said[-1].reply = reply
        if isinstance(reply, Refused):
            raise reply
        return reply

    model.call = recorded  # type: ignore[method-assign]


def repeated(one: Said, run_id: str) -> list[bytes]:
    """The command for a real server."""
    command = list(one.command)
    if command[0] in (b"EVAL", b"EVALSHA"):
        text = _TEXTS.get(command[1], b"" if command[0] == b"EVALSHA" else command[1])
        ids = ", ".join(f"'{id_.decode()}'" for id_ in one.ids)
        seconds, micros = divmod(one.micros, 1_000_000)
        head = _HEAD.format(ids=ids, seconds=seconds, micros=micros, run_id=run_id)
        return [b"EVAL", head.encode() + (text if isinstance(text, bytes) else text.encode()), *command[2:]]
    if command[0] == b"XADD" and b"*" in command:
        command[command.index(b"*")] = one.ids[0]
    if command[0] == b"XREAD" and b"BLOCK" in command:
        place = command.index(b"BLOCK")
        del command[place : place + 2]
    return command


def loose(reply: Any) -> Any:
    """Without the order of hashes and sets; of an error, its first word."""
    if isinstance(reply, Refused | redis.ResponseError):
        return "an error"
    return sorted(map(repr, map(loose, reply))) if isinstance(reply, list) else reply


def contents(client: Any, key: bytes, value: Any) -> Any:
    if isinstance(value, Scores):
        return dict(client.zrange(key, 0, -1, withscores=True))
    if isinstance(value, Stream):
        return [(id_, tuple(part for pair in fields.items() for part in pair)) for id_, fields in client.xrange(key)]
    reads: dict[type, Any] = {dict: client.hgetall, set: client.smembers, bytes: client.get}
    return client.lrange(key, 0, -1) if isinstance(value, list) else reads[type(value)](key)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    own = OwnRedis(tmp_path / "redis", settings={"appendonly": "no"})
    try:
        with own.client() as client:
            yield client
    finally:
        own.kill()


@pytest.mark.parametrize("seed", range(1, 5))
def test_real_server_answers_as_the_model(server: Any, seed: int) -> None:
    plan, said = Plan.drawn(seed), list[Said]()
    kinds = {"kill", "kill often", "pause", "scale", "second trainer", "stop", "order", "garbage", "cut", "slow"}
    with simulated(seed, plan.setting) as run:
        record(run.model, said)
        run.begin()
        run.scheduler.run_until(60.0, lambda: "trainer" in run.processes)
        Faults(run, [fault for fault in plan.faults if fault.kind in kinds])
        run.scheduler.run_until(run.scheduler.now + 30.0)
        keys, run_id = run.model.keys, run.model.run_id
    for one in said:
        if one.command[0] in (b"HELLO", b"PING", b"INFO", b"TIME", b"CLIENT", b"SELECT"):
            continue
        if isinstance(one.reply, Refused) and str(one.reply).startswith("NOSCRIPT"):
            continue
        try:
            reply = server.execute_command(*repeated(one, run_id), NEVER_DECODE=True)
        except redis.ResponseError as error:
            reply = error
        if one.command[0] not in (b"HGETALL", b"XREAD", b"XRANGE", b"XREVRANGE"):  # redis-py parses these
            assert loose(reply) == loose(one.reply), one
    assert len(said) > 300
    for key, value in keys.items():
        if key.rpartition(b":")[2] not in _CUT:
            expected = value
            if isinstance(value, Stream):
                expected = [(b"%d-%d" % id_, fields) for id_, fields in zip(value.ids, value.fields, strict=True)]
            assert contents(server, key, value) == expected, key
