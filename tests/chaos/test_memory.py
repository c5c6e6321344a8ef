"""Size of the run's keys in Redis: it does not grow with the number of fragments."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagecoach.shared.base.errors import DropReason
from stagecoach.shared.protocol.ledger import read_accounting
from tests.chaos.memory import new_role, pump
from tests.conftest import RedisServer

pytestmark = pytest.mark.timeout(300)

FRAGMENTS = 4_000
GROWN = 1.5
"""Streams are trimmed by whole nodes, so that their sizes go up and down a little."""


def test_no_key_grows_with_the_fragments(redis_server: RedisServer, tmp_path: Path) -> None:
    role = new_role(redis_server, tmp_path)
    looks = list(pump(role, FRAGMENTS, FRAGMENTS // 4, life=5))
    assert [look.fragments for look in looks] == [FRAGMENTS * part // 4 for part in (1, 2, 3, 4)]
    second, last = looks[1], looks[-1]
    grown = {key: (second.keys.get(key), size) for key, size in last.keys.items() if size > GROWN * second.keys[key]}
    assert grown == {}
    assert sum(last.keys.values()) < 2 << 20
    accounting = read_accounting(role.redis, role.run_id)
    assert all(line.balances for line in accounting.values())
    assert accounting["total"].consumed.fragments == FRAGMENTS
    assert accounting["total"].dropped[DropReason.UNDECODABLE].fragments > 0
    role.redis.close()
