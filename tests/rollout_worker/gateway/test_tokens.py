"""Tokens of a gateway's clients in the store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from stagecoach.rollout_worker.gateway.tokens import add_token, read_tokens, revoke_token
from tests.support.services.memory_store import MemoryStore


def test_tokens_that_are_added_at_once_are_all_kept() -> None:
    store = MemoryStore()
    names = [f"c{number}" for number in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(partial(add_token, store), names))
    assert sorted(read_tokens(store)) == names
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(partial(revoke_token, store), names))
    assert read_tokens(store) == {}
