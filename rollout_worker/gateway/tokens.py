"""The tokens of a run's clients: an object of the run's store, with hashes alone, which gateways keep reading."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from dataclasses import dataclass, field
from typing import Any

from stagecoach.shared.base import world
from stagecoach.shared.base.errors import ObjectMissing, StagecoachError, UserError
from stagecoach.shared.storage.object_store import ObjectStore

TOKENS = "gateway/tokens.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TRIES, _SETTLE_SECONDS = 20, 0.1
_FRESH_SECONDS, _NEW_SECONDS = 2.0, 0.1
"""Age at which they are read again: for a known token, and for an unknown one."""


def read_tokens(store: ObjectStore) -> dict[str, str]:
    """Returns client → SHA-256 of its token."""
    try:
        found = json.loads(store.get(TOKENS))
        return {str(name): str(digest) for name, digest in found.items()}
    except ObjectMissing:
        return {}
    except (ValueError, AttributeError) as error:
        raise StagecoachError(
            f"{TOKENS} in the store is damaged ({error}); delete it, and add the clients again"
        ) from None


def add_token(store: ObjectStore, name: str) -> str:
    """Creates a client's token, which is shown this once; raises `UserError` if it has one, or for an unusable name."""
    if not _NAME.fullmatch(name):
        raise UserError(f"client {name!r}: expected 1 to 64 letters, digits, '.', '_' or '-', a letter or digit first")
    tokens = read_tokens(store)
    if name in tokens:
        raise UserError(f"client {name} has a token already; revoke it first: `stagecoach gateway revoke RUN {name}`")
    token = world.token_hex(24)
    _insist(store, name, _digest(token))
    return token


def revoke_token(store: ObjectStore, name: str) -> None:
    """Removes a client's token; gateways close its connections within seconds. Raises `UserError` without one."""
    tokens = read_tokens(store)
    if name not in tokens:
        raise UserError(f"client {name} has no token; those that have one: {', '.join(sorted(tokens)) or 'none'}")
    _insist(store, name, None)


def _insist(store: ObjectStore, name: str, digest: str | None) -> None:
    """Writes a client's hash, or removes it, until that holds: others may write the same object at the same time."""
    for _ in range(_TRIES):
        tokens = {its: known for its, known in read_tokens(store).items() if its != name}
        store.put(TOKENS, json.dumps(tokens | ({name: digest} if digest else {}), sort_keys=True).encode())
        world.sleep(_SETTLE_SECONDS * (1 + int(world.token_hex(1), 16) / 256))
        if read_tokens(store).get(name) == digest:
            return
    raise StagecoachError(f"others keep writing {TOKENS} in the store; try again")


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


@dataclass
class Tokens:
    """The tokens as a gateway knows them, at most seconds old; while the store is away, as they were."""

    store: ObjectStore
    _known: dict[str, str] | None = None
    _read_at: float = 0.0
    _lock: Any = field(default_factory=world.Lock)

    def client(self, token: str) -> str | None:
        """Returns the client whose token this is."""
        digest = _digest(token)
        for fresh_seconds in (_FRESH_SECONDS, _NEW_SECONDS):  # it may be new
            for name, its in self._now(fresh_seconds).items():
                if hmac.compare_digest(its, digest):
                    return name
        return None

    def valid(self, client: str) -> bool:
        return client in self._now(_FRESH_SECONDS)

    def _now(self, fresh_seconds: float) -> dict[str, str]:
        with self._lock:
            age = world.monotonic() - self._read_at
            if self._known is None or age > fresh_seconds:
                world.sleep(max(0.0, _NEW_SECONDS - age))  # whoever guesses tokens does not flood the store
                try:
                    self._known = read_tokens(self.store)
                except StagecoachError:
                    if self._known is None:
                        raise
                self._read_at = world.monotonic()
            return self._known
