"""Redis in memory, as far as Stagecoach uses it: its data, its commands, and the real Lua scripts in a real Lua 5.1.

`test_redis_model.py` holds it against a real server: the same commands, the same replies and contents.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lupa import lua51

_DENIED_WITHOUT_MEMORY = {b"HSET", b"HSETNX", b"HINCRBY", b"SADD", b"ZADD", b"XADD", b"RPUSH", b"SET"}
_WRITES = _DENIED_WITHOUT_MEMORY | {b"DEL", b"HDEL", b"SREM", b"ZREM", b"XDEL", b"XTRIM", b"LTRIM"}
_OUT_OF_MEMORY = "OOM command not allowed when used memory > 'maxmemory'."
_WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
_ID = re.compile(rb"(\d{1,20})(?:-(\d{1,20}))?")
_LARGEST = 2**64 - 1
_WHOLE = re.compile(rb"-?\d{1,18}")
_LISTPACK = 100
"""Entries of a stream's node; `MAXLEN ~` removes whole nodes."""
Id = tuple[int, int]


class Refused(Exception):
    """A reply that is an error, with its text."""


class Status(bytes):
    """A reply such as `OK`."""


class Stream:
    def __init__(self) -> None:
        self.ids: list[Id] = []
        self.fields: list[tuple[bytes, ...]] = []
        self.last: Id = (0, 0)

    def copy(self) -> Stream:
        new = Stream()
        new.ids, new.fields, new.last = self.ids.copy(), self.fields.copy(), self.last
        return new

    def add(self, id_: Id, fields: tuple[bytes, ...]) -> None:
        self.ids.append(id_)
        self.fields.append(fields)
        self.last = id_

    def between(self, first: Id, last: Id) -> range:
        return range(bisect.bisect_left(self.ids, first), bisect.bisect_right(self.ids, last))

    def cut(self, places: range) -> int:
        del self.ids[places.start : places.stop]
        del self.fields[places.start : places.stop]
        return len(places)

    def shown(self, places: Sequence[int]) -> list[Any]:
        return [[_text(self.ids[place]), list(self.fields[place])] for place in places]


def _text(id_: Id) -> bytes:
    return b"%d-%d" % id_


def _id(text: bytes, seq: int) -> Id:
    found = _ID.fullmatch(text)
    if found is None or int(found[1]) > _LARGEST:
        raise Refused("ERR Invalid stream ID specified as stream command argument")
    return int(found[1]), seq if found[2] is None else int(found[2])


def _bound(text: bytes, first: bool) -> Id:
    if text == b"-":
        return (0, 0)
    if text == b"+":
        return (_LARGEST, _LARGEST)
    if text.startswith(b"("):
        ms, seq = _id(text[1:], 0 if first else _LARGEST)
        if first:
            return (ms, seq + 1) if seq < _LARGEST else (ms + 1, 0)
        return (ms, seq - 1) if seq else (ms - 1, _LARGEST)
    return _id(text, 0 if first else _LARGEST)


def _score(text: bytes) -> float:
    try:
        return float(text.replace(b"inf", b"inf"))
    except ValueError:
        raise Refused("ERR value is not a valid float") from None


def _number(value: float) -> bytes:
    return b"%d" % value if value == int(value) and abs(value) < 1e17 else b"%.17g" % value


class Keys(dict[bytes, Any]):
    """All keys: hashes as dict, sets as set, sorted sets as `Scores`, lists as list, streams, strings as bytes."""

    def copy(self) -> Keys:
        return Keys({key: value if isinstance(value, bytes) else value.copy() for key, value in self.items()})


class Scores(dict[bytes, float]):
    def copy(self) -> Scores:
        return Scores(self)

    def ordered(self) -> list[bytes]:
        return sorted(self, key=lambda member: (self[member], member))


class RedisModel:
    """One server. `now` returns its clock in seconds since 1970."""

    def __init__(self, now: Callable[[], float], run_id: str) -> None:
        self.keys, self.now, self.run_id = Keys(), now, run_id
        self.memory_full = False
        self.executed: Callable[[str, list[bytes], list[bytes], Any], None] = lambda sha, keys, args, reply: None
        """Called after each script that was carried out."""
        self.writes = 0
        self._scripts: dict[str, Any] = {}
        self._known: set[str] = set()
        """Scripts that this process of the server has been sent."""
        self._inside: list[bool] = []
        """In a script: whether it may write although there is no memory."""
        self._lua = lua51.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        self._prepare()

    def restart(self, keys: Keys, run_id: str) -> None:
        """Becomes another process of the server, with these keys."""
        self.keys, self.run_id = keys, run_id
        self._known.clear()

    # Commands

    def call(self, *command: bytes) -> Any:
        """Carries out one command; raises `Refused`."""
        name = command[0].upper()
        method = getattr(self, "_" + name.decode().lower(), None)
        if method is None:
            raise Refused(f"ERR unknown command '{name.decode()}'")
        if self.memory_full and name in _DENIED_WITHOUT_MEMORY and not (self._inside and self._inside[-1]):
            raise Refused(_OUT_OF_MEMORY)
        if name in _WRITES:
            self.writes += 1
            if self._inside:
                self._inside[-1] = True
        return method(*command[1:])

    def _get_value(self, key: bytes, kind: Any, make: bool = False) -> Any:
        value = self.keys.get(key)
        if value is None:
            value = kind()
            if make:
                self.keys[key] = value
        elif type(value) is not kind:
            raise Refused(_WRONG_TYPE)
        return value

    def _forget_if_empty(self, key: bytes) -> None:
        if key in self.keys and not isinstance(self.keys[key], Stream) and not self.keys[key]:
            del self.keys[key]

    def _ping(self) -> Any:
        return Status(b"PONG")

    def _hello(self, *arguments: bytes) -> Any:
        return [b"server", b"redis", b"version", b"7.2.0", b"proto", 3, b"mode", b"standalone"]

    def _select(self, number: bytes) -> Any:
        return Status(b"OK")

    def _client(self, *arguments: bytes) -> Any:
        return Status(b"OK")

    def _time(self) -> Any:
        micros = round(self.now() * 1e6)
        return [b"%d" % (micros // 1_000_000), b"%d" % (micros % 1_000_000)]

    def _info(self, *sections: bytes) -> Any:
        lines = {
            "redis_version": "7.2.0", "redis_mode": "standalone", "run_id": self.run_id,
            "maxmemory_policy": "noeviction", "evicted_keys": 0, "used_memory": 0,
        }  # fmt: skip
        return "".join(f"{name}:{value}\r\n" for name, value in lines.items()).encode()

    def _type(self, key: bytes) -> Any:
        kinds = {dict: b"hash", set: b"set", Scores: b"zset", list: b"list", Stream: b"stream", bytes: b"string"}
        return Status(kinds[type(self.keys[key])] if key in self.keys else b"none")

    def _exists(self, *keys: bytes) -> Any:
        return sum(key in self.keys for key in keys)

    def _del(self, *keys: bytes) -> Any:
        return sum(self.keys.pop(key, None) is not None for key in keys)

    def _get(self, key: bytes) -> Any:
        return self._get_value(key, bytes) if key in self.keys else None

    def _set(self, key: bytes, value: bytes) -> Any:
        self.keys[key] = value
        return Status(b"OK")

    # Hashes

    def _hset(self, key: bytes, *pairs: bytes) -> Any:
        if not pairs or len(pairs) % 2:
            raise Refused("ERR wrong number of arguments for 'hset' command")
        found = self._get_value(key, dict, make=True)
        before = len(found)
        found.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(found) - before

    def _hsetnx(self, key: bytes, name: bytes, value: bytes) -> Any:
        found = self._get_value(key, dict, make=True)
        if name in found:
            return 0
        found[name] = value
        return 1

    def _hget(self, key: bytes, name: bytes) -> Any:
        return self._get_value(key, dict).get(name)

    def _hmget(self, key: bytes, *names: bytes) -> Any:
        found = self._get_value(key, dict)
        return [found.get(name) for name in names]

    def _hgetall(self, key: bytes) -> Any:
        return [part for pair in self._get_value(key, dict).items() for part in pair]

    def _hkeys(self, key: bytes) -> Any:
        return list(self._get_value(key, dict))

    def _hexists(self, key: bytes, name: bytes) -> Any:
        return int(name in self._get_value(key, dict))

    def _hdel(self, key: bytes, *names: bytes) -> Any:
        found = self._get_value(key, dict)
        removed = sum(found.pop(name, None) is not None for name in names)
        self._forget_if_empty(key)
        return removed

    def _hincrby(self, key: bytes, name: bytes, by: bytes) -> Any:
        found = self._get_value(key, dict, make=True)
        before = found.get(name, b"0")
        if not _WHOLE.fullmatch(before):
            raise Refused("ERR hash value is not an integer")
        if not _WHOLE.fullmatch(by):
            raise Refused("ERR value is not an integer or out of range")
        found[name] = b"%d" % (int(before) + int(by))
        return int(found[name])

    # Sets, sorted sets, lists

    def _sadd(self, key: bytes, *members: bytes) -> Any:
        found = self._get_value(key, set, make=True)
        before = len(found)
        found.update(members)
        return len(found) - before

    def _srem(self, key: bytes, *members: bytes) -> Any:
        found = self._get_value(key, set)
        before = len(found)
        found.difference_update(members)
        self._forget_if_empty(key)
        return before - len(found)

    def _sismember(self, key: bytes, member: bytes) -> Any:
        return int(member in self._get_value(key, set))

    def _smismember(self, key: bytes, *members: bytes) -> Any:
        found = self._get_value(key, set)
        return [int(member in found) for member in members]

    def _smembers(self, key: bytes) -> Any:
        return sorted(self._get_value(key, set))

    def _zadd(self, key: bytes, *pairs: bytes) -> Any:
        found = self._get_value(key, Scores, make=True)
        before = len(found)
        found.update({member: _score(score) for score, member in zip(pairs[::2], pairs[1::2], strict=True)})
        return len(found) - before

    def _zrem(self, key: bytes, *members: bytes) -> Any:
        found = self._get_value(key, Scores)
        removed = sum(found.pop(member, None) is not None for member in members)
        self._forget_if_empty(key)
        return removed

    def _zscore(self, key: bytes, member: bytes) -> Any:
        score = self._get_value(key, Scores).get(member)
        return None if score is None else _number(score)

    def _zcard(self, key: bytes) -> Any:
        return len(self._get_value(key, Scores))

    def _zrange(self, key: bytes, first: bytes, last: bytes) -> Any:
        return _slice(self._get_value(key, Scores).ordered(), first, last)

    def _zrangebyscore(self, key: bytes, low: bytes, high: bytes) -> Any:
        found = self._get_value(key, Scores)
        least, most = _score(low.removeprefix(b"(")), _score(high.removeprefix(b"("))
        without_least, without_most = low.startswith(b"("), high.startswith(b"(")
        inside = (
            member
            for member in found.ordered()
            if least <= found[member] <= most
            and not (without_least and found[member] == least)
            and not (without_most and found[member] == most)
        )
        return list(inside)

    def _rpush(self, key: bytes, *values: bytes) -> Any:
        found = self._get_value(key, list, make=True)
        found.extend(values)
        return len(found)

    def _ltrim(self, key: bytes, first: bytes, last: bytes) -> Any:
        found = self._get_value(key, list)
        found[:] = _slice(found, first, last)
        self._forget_if_empty(key)
        return Status(b"OK")

    def _lrange(self, key: bytes, first: bytes, last: bytes) -> Any:
        return _slice(self._get_value(key, list), first, last)

    def _lindex(self, key: bytes, index: bytes) -> Any:
        found = self._get_value(key, list)
        return found[int(index)] if -len(found) <= int(index) < len(found) else None

    # Streams

    def _xadd(self, key: bytes, *rest: bytes) -> Any:
        most = None
        if rest[0].upper() == b"MAXLEN":
            most, rest = int(rest[2]), rest[3:]
        text, fields = rest[0], rest[1:]
        if not fields or len(fields) % 2:
            raise Refused("ERR wrong number of arguments for 'xadd' command")
        stream = self._get_value(key, Stream, make=key not in self.keys)
        if text == b"*":
            ms = int(self.now() * 1000)
            last_ms, last_seq = stream.last
            id_ = (ms, 0) if ms > last_ms else (last_ms, last_seq + 1)
        else:
            id_ = _id(text, 0)
            if id_ == (0, 0):
                raise Refused("ERR The ID specified in XADD must be greater than 0-0")
            if id_ <= stream.last:
                raise Refused("ERR The ID specified in XADD is equal or smaller than the target stream top item")
        stream.add(id_, tuple(fields))
        if most is not None:
            while len(stream.ids) - _LISTPACK >= most:
                stream.cut(range(_LISTPACK))
        return _text(id_)

    def _xlen(self, key: bytes) -> Any:
        return len(self._get_value(key, Stream).ids)

    def _xrange(self, key: bytes, first: bytes, last: bytes, *count: bytes) -> Any:
        stream = self._get_value(key, Stream)
        places = stream.between(_bound(first, True), _bound(last, False))
        return stream.shown(places[: int(count[1])] if count else places)

    def _xrevrange(self, key: bytes, last: bytes, first: bytes, *count: bytes) -> Any:
        stream = self._get_value(key, Stream)
        places = stream.between(_bound(first, True), _bound(last, False))[::-1]
        return stream.shown(places[: int(count[1])] if count else places)

    def _xdel(self, key: bytes, *ids: bytes) -> Any:
        stream = self._get_value(key, Stream)
        return sum(stream.cut(stream.between(id_, id_)) for id_ in (_id(text, 0) for text in ids))

    def _xtrim(self, key: bytes, strategy: bytes, *rest: bytes) -> Any:
        assert strategy.upper() == b"MINID", strategy
        stream, least = self._get_value(key, Stream), _id(rest[-1], 0)
        return stream.cut(range(bisect.bisect_left(stream.ids, least)))

    def _xread(self, *arguments: bytes) -> Any:
        """Without its BLOCK, which is the connection's: None if there is nothing yet."""
        count, words = None, list(arguments)
        while (word := words.pop(0).upper()) != b"STREAMS":
            value = words.pop(0)
            count = int(value) if word == b"COUNT" else count
        half, found = len(words) // 2, []
        for key, after in zip(words[:half], words[half:], strict=True):
            stream = self._get_value(key, Stream)
            start = stream.last if after == b"$" else _id(after, 0)
            places = range(bisect.bisect_right(stream.ids, start), len(stream.ids))
            if places:
                found.append([key, stream.shown(places[:count])])
        return found or None

    # Scripts

    def _evalsha(self, sha: bytes, *arguments: bytes) -> Any:
        if sha.decode() not in self._known:
            raise Refused("NOSCRIPT No matching script. Please use EVAL.")
        return self._run(sha.decode(), arguments)

    def _eval(self, text: bytes, *arguments: bytes) -> Any:
        sha = hashlib.sha1(text, usedforsecurity=False).hexdigest()
        if sha not in self._scripts:
            self._scripts[sha] = self._lua.execute(b"return function(KEYS, ARGV)\n" + text + b"\nend")
        self._known.add(sha)
        return self._run(sha, arguments)

    def _run(self, sha: str, arguments: tuple[bytes, ...]) -> Any:
        count = int(arguments[0])
        keys, values = list(arguments[1 : count + 1]), list(arguments[count + 1 :])
        self._inside.append(not self.memory_full)
        try:
            reply = self._from_lua(self._scripts[sha](self._lua.table_from(keys), self._lua.table_from(values)))
        except Refused as error:
            raise Refused(f"{error} script: {sha}, on @user_script:1.") from None
        except lua51.LuaError as error:
            raise Refused(f"ERR user_script:1: {error} script: {sha}, on @user_script:1.") from None
        finally:
            self._inside.pop()
        self.executed(sha, keys, values, reply)
        if isinstance(reply, Refused):
            raise reply
        return reply

    def _prepare(self) -> None:
        def called(*arguments: Any) -> Any:
            return self._to_lua(self.call(*map(_argument, arguments)))

        def protected(*arguments: Any) -> Any:
            try:
                return called(*arguments)
            except Refused as error:
                return self._lua.table_from({b"err": str(error).encode()})

        def error_reply(text: bytes) -> Any:
            return self._lua.table_from({b"err": text})

        def decoded(text: bytes) -> Any:
            return self._plain(json.loads(text))

        globals_ = self._lua.globals()

        def sha1hex(text: bytes) -> bytes:
            return hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()

        functions = {b"call": called, b"pcall": protected, b"error_reply": error_reply, b"sha1hex": sha1hex}
        globals_[b"redis"] = self._lua.table_from(functions)
        globals_[b"cjson"] = self._lua.table_from({b"decode": decoded})

    def _plain(self, value: Any) -> Any:
        if isinstance(value, dict):
            return self._lua.table_from({key.encode(): self._plain(item) for key, item in value.items()})
        if isinstance(value, list):
            return self._lua.table_from([self._plain(item) for item in value])
        return value.encode() if isinstance(value, str) else value

    def _to_lua(self, reply: Any) -> Any:
        if reply is None:
            return False
        if isinstance(reply, Status):
            return self._lua.table_from({b"ok": bytes(reply)})
        if isinstance(reply, list):
            return self._lua.table_from([self._to_lua(item) for item in reply])
        return reply

    def _from_lua(self, value: Any) -> Any:
        if value is None or value is False:
            return None
        if value is True:
            return 1
        if isinstance(value, int | float):
            return int(value)
        if isinstance(value, bytes):
            return value
        if (error := value[b"err"]) is not None:
            return Refused(error.decode(errors="replace"))
        if (status := value[b"ok"]) is not None:
            return Status(status)
        return list(self._items(value))

    def _items(self, table: Any) -> Iterator[Any]:
        index = 1
        while (item := table[index]) is not None:
            yield self._from_lua(item)
            index += 1


def _argument(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number(value)
    raise Refused("ERR Lua redis lib command arguments must be strings or integers")


def _slice(items: list[bytes], first: bytes, last: bytes) -> list[bytes]:
    begin, end = int(first), int(last)
    begin = max(0, begin + len(items)) if begin < 0 else begin
    end = end + len(items) if end < 0 else end
    return items[begin : end + 1]
