"""Bodies on shards: each worker's spread evenly, found again in one round trip each, swept when nobody needs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from stagecoach.shared.base.errors import ConfigError, RedisUnavailable, ShardFull, ShardUnavailable
from stagecoach.shared.experience.log_entry import BodyPlace
from stagecoach.shared.protocol.flow_control import RunState
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.payload_shards import Bodies, bytes_by_shard
from stagecoach.shared.protocol.redis_client import shard_clients
from stagecoach.shared.runtime.run_context import RunContext
from tests.conftest import MakeRole, RedisServer
from tests.support.runs.builders import shard_fields
from tests.support.runs.small_run import SmallTrainer, SmallWorker, begin, small_config
from tests.support.services.own_redis import OwnRedis

words = st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1)


def sharded_role(make_role: MakeRole, redis_server: RedisServer, databases: tuple[int, ...] = (1, 2)) -> RunContext:
    config = small_config()
    urls = tuple(f"{redis_server.url}/{db}" for db in databases)
    return make_role(config.model_copy(update={"redis": config.redis.model_copy(update={"shards": urls})}))


@pytest.fixture
def role(make_role: MakeRole, redis_server: RedisServer) -> RunContext:
    """With its bodies on two shards."""
    return sharded_role(make_role, redis_server)


def only_entry(role: RunContext) -> dict[bytes, bytes]:
    """The log's, as Redis holds it."""
    page: Any = role.redis.xrange(RunKeys(role.run_id).log)
    ((_, entry),) = page
    return dict(entry)


@given(words, words, st.integers(0, 2**40))
def test_body_place_round_trips(shard: str, field: str, size: int) -> None:
    place = BodyPlace(shard, field, size)
    assert BodyPlace.decode(place.encode()) == place
    for text in (b"", b"a b", b"a b c", b"a b 1 2", b"a b -1", b"\xff\xfe", "a b ٣".encode() + b" 1"):
        assert BodyPlace.decode(text) is None


def test_bodies_spread_over_shards_and_are_fetched(shards: dict[str, redis.Redis], unique_run_id: str) -> None:
    bodies = Bodies(shards, unique_run_id)
    written = [(worker, seq, f"{worker} {seq}".encode()) for worker in ("worker-0", "worker-1") for seq in range(30)]
    wanted = [(worker, bodies.put(worker, 0, seq, data)) for worker, seq, data in written]
    assert bodies.names == tuple(shards)
    assert Counter(place.shard for worker, place in wanted if worker == "worker-0") == dict.fromkeys(shards, 10)
    assert all(wanted[index][1].shard != wanted[index + 1][1].shard for index in range(29))
    assert bodies.put("worker-0", 0, 7, b"worker-0 7") == wanted[7][1], "safe to repeat"
    assert bodies.fetch(wanted) == [data for *_, data in written]
    other = bodies.put("worker-0", 0, 7, b"of another process with the same number and incarnation")
    elsewhere = BodyPlace("a shard that left", wanted[7][1].field, 3)
    bodies.remove("worker-0", other)
    found = bodies.fetch([("worker-0", other), wanted[7], ("worker-0", elsewhere)])
    assert found == [None, b"worker-0 7", None], "as after a Redis that was rolled back"


def test_without_shards_the_log_holds_the_bodies(make_role: MakeRole) -> None:
    role = make_role(small_config())
    begin(role)
    SmallWorker(role).work()
    assert not role.bodies and role.flow.read().shards == ()
    entry = only_entry(role)
    assert b"fragment" in entry and b"body" not in entry
    assert bytes_by_shard(role.redis, role.run_id) == {}


def test_sharded_log_names_places_and_counts_bytes(role: RunContext) -> None:
    trainer, worker = begin(role), SmallWorker(role)
    worker.work(blob=b"x" * 1000)
    worker.seq = 0
    assert worker.push(b"x" * 1000) == "duplicate", "and its body stays"
    entry = only_entry(role)
    assert b"fragment" not in entry and len(entry[b"body"]) < 100
    assert role.flow.read().log_bytes == 1000
    sizes = bytes_by_shard(role.redis, role.run_id)
    assert sum(sizes.values()) == 1000 and set(sizes) < set(role.bodies.names)
    (found,) = trainer.log.read("0-0", 10, 0.0)
    assert found.fragment == b"x" * 1000 and found.pushed and not found.lost_body
    assert list(trainer.log.between("0-0", found.id)) == [found]


@pytest.mark.parametrize("word", ["stale", "superseded", "finished", "epoch"])
def test_refused_push_removes_its_body(role: RunContext, word: str) -> None:
    begin(role)
    worker = SmallWorker(role)
    reasons: dict[str, Callable[[], object]] = {
        "stale": lambda: [SmallWorker(role, f"worker-{index}").push() for index in (1, 2)],
        "superseded": lambda: SmallWorker(role),
        "finished": lambda: role.flow.set_state(RunState.FINISHED, "enough"),
        "epoch": lambda: setattr(worker, "epoch", 9),
    }
    reasons[word]()
    assert worker.push() == word
    assert shard_fields(role) == set()
    if word == "stale":
        assert worker.send(b"another") == "stale"
        assert worker.push(b"another") == "stale"
        assert role.redis.hget(RunKeys(role.run_id).produced, "worker-0:fragments:stale") == b"2"


def consume(trainer: SmallTrainer, worker: SmallWorker, updates: int) -> str:
    """So many versions; answers the position behind them."""
    for _ in range(updates):
        for _ in range(2):
            worker.work(trainer.version)
            assert trainer.take() is not None
        trainer.publish()
    return trainer.consumer.committed.position


def test_trim_sweeps_covered_and_orphaned_bodies_only(role: RunContext) -> None:
    trainer, worker = begin(role), SmallWorker(role)
    role.bodies.put("worker-0", 0, 0, b"of a former process of this number, that never pushed it")
    through = consume(trainer, worker, 2)
    worker.work(trainer.version, b"in the log")
    role.bodies.put("worker-0", 0, 5, b"its push is on its way")
    role.bodies.put("worker-1", 0, 0, b"of a worker that has not registered, as far as Redis knows")
    with next(iter(shard_clients(role.address, role.config).values())) as client:
        client.hset(RunKeys(role.run_id).bodies("worker-0"), "by hand", "x")
    assert len(shard_fields(role)) == 1 + 4 + 1 + 1 + 1
    assert trainer.log.trim(trainer.epoch, through) == 4
    assert {field[:4] for field in shard_fields(role)} == {"0:4:", "0:5:"}
    assert len(shard_fields(role, "worker-1")) == 1
    successor = SmallWorker(role)
    trainer.log.trim(trainer.epoch, through)
    assert {field[:4] for field in shard_fields(role)} == {"0:4:"}, "the push of a former life is refused"
    role.bodies.put("worker-0", successor.incarnation, 0, b"its push is on its way")
    SmallWorker(role, "worker-1")
    trainer.log.trim(trainer.epoch, through)
    assert {field[:4] for field in shard_fields(role)} == {"0:4:", "1:0:"}
    assert len(shard_fields(role, "worker-1")) == 1
    assert trainer.take() is None, "what is in the log was no fragment"
    trainer.log.trim(trainer.epoch, trainer.consumer.position)
    assert {field[:4] for field in shard_fields(role)} == {"1:0:"}


def test_many_bodies_are_swept_in_pieces(role: RunContext) -> None:
    begin(role)
    SmallWorker(role)
    for seq in range(1500):
        role.bodies.put("worker-0", 0, seq, b"x")
    SmallWorker(role)
    assert role.bodies.sweep(role.redis) == 1500
    assert shard_fields(role) == set()


def test_unusable_shard_is_named(tmp_path: Any, unique_run_id: str) -> None:
    server = OwnRedis(tmp_path / "shard")
    bodies = Bodies({"a/0": server.client()}, unique_run_id)
    try:
        place = bodies.put("worker-0", 0, 0, b"x")
        server.command("CONFIG", "SET", "maxmemory", 1)
        with pytest.raises(ShardFull, match="shard a/0 has no memory left"):
            bodies.put("worker-0", 0, 1, b"x")
        assert bodies.fetch([("worker-0", place)]) == [b"x"]
        server.command("CONFIG", "SET", "maxmemory", 0)
        locked = Bodies({"a/0": redis.Redis(port=server.port, password="another")}, unique_run_id)
        with pytest.raises(RedisUnavailable, match="shard a/0 refuses the credentials"):
            locked.put("worker-0", 0, 1, b"x")
        server.kill()
        with pytest.raises(ShardUnavailable, match="shard a/0 cannot be used: "):
            bodies.fetch([("worker-0", place)])
        with pytest.raises(ShardUnavailable, match="shard a/0 cannot be used: "):
            bodies.put("worker-0", 0, 1, b"x")
        bodies.remove("worker-0", place)
    finally:
        server.kill()


def test_sweep_skips_unavailable_shard(make_role: MakeRole, shards: dict[str, redis.Redis], tmp_path: Any) -> None:
    role = make_role(small_config())
    server = OwnRedis(tmp_path / "shard")
    bodies = Bodies({"away/0": server.client(), **shards}, role.run_id)
    SmallWorker(role)
    for seq in range(8):
        bodies.put("worker-0", 0, seq, b"x")
    SmallWorker(role)
    server.kill()
    assert bodies.sweep(role.redis) == 6
    server.start()
    assert bodies.sweep(role.redis) == 2
    server.kill()


def test_role_with_other_shards_is_refused(make_role: MakeRole, redis_server: RedisServer) -> None:
    sharded_role(make_role, redis_server, (1, 2)).check_config()
    other = sharded_role(make_role, redis_server, (2,))
    with pytest.raises(ConfigError, match=r"redis\.shards are \S+/2, those of run \S+ are \S+/1, \S+/2;"):
        other.check_config()
    with pytest.raises(ConfigError, match=r"redis\.shards are none, those"):
        make_role(small_config()).check_config()
