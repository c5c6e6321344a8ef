"""A small run for tests: real Redis, a folder store, one trainer and one real worker, stepped in turn."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from coordinator.services import new_secret
from rollout_worker.making import describe_environment
from rollout_worker.worker import Worker
from shared.checkpoint import ENVIRONMENT, FINISHED
from shared.config import Config
from shared.connection import Address
from shared.events import read_events
from shared.ledger import read_books
from shared.policies.codec import decode_policy, state_arrays
from shared.policy_board import PolicyBoard
from shared.redis_keys import RunKeys
from shared.role import Role, open_role
from shared.spaces import Columns
from tests.conftest import RedisServer, create_flow, minimal_config
from trainer_node.trainer import Trainer

POLICY = "default/policy.safetensors"


class Game:
    """One run: its roles, its trainer (the present one) and its worker."""

    def __init__(self, open_: Callable[[], Role]) -> None:
        self._open = open_
        self.role = open_()
        self.trainer = Trainer(open_(), None)
        self.worker = Worker(open_(), 0)
        self._others: list[Worker] = []
        self.trainer.start()
        self.worker.start()

    def play(self, until: Callable[[], bool] = lambda: False) -> None:
        """Worker and trainer in turn, until the trainer says that the run ends."""
        for _ in range(1000):
            if until():
                return
            self.worker.step(0)
            if self.trainer.step(0) == "ended":
                return
        raise AssertionError("the run does not end")

    def play_to(self, version: int) -> None:
        """Until that version is published."""
        self.play(lambda: self.trainer.version >= version)

    def another_worker(self, index: int) -> Worker:
        """One more worker of the run, started."""
        worker = Worker(self._open(), index)
        worker.start()
        self._others.append(worker)
        return worker

    def crash(self) -> None:
        """The trainer is gone: nothing is finished, nothing is said."""
        self.trainer._publisher.close()
        self.trainer._heartbeat._stop.set()

    def restart(self) -> None:
        """A new trainer takes up the run."""
        self.trainer = Trainer(self._open(), None)
        self.trainer.start()

    def lose(self) -> None:
        """Trainer and worker are gone at once, and the next ones take over."""
        self.crash()
        die(self)
        self.restart()
        replace_worker(self)

    def lose_at(self, versions: Iterable[int]) -> None:
        """Plays on to each of these versions, and is lost there."""
        for version in versions:
            self.play_to(version)
            self.lose()

    def finish(self) -> str:
        """Plays to the end and writes `.finished`; answers the SHA-256 of the final policy file."""
        self.play()
        self.trainer.finish(self.role.flow.read().reason or "exhausted")
        return self.policy_hash()

    def policy_hash(self) -> str:
        """SHA-256 of the newest checkpoint's policy file."""
        latest = self.role.checkpoints.load_latest()
        assert latest is not None
        return hashlib.sha256(latest.objects[POLICY]).hexdigest()

    def durable(self) -> None:
        """Waits until the store has what was submitted."""
        self.trainer._publisher.wait_idle(100)

    def board_version(self) -> int:
        """What workers act with."""
        version = PolicyBoard(self.role.redis, self.role.run_id).fetch(self.role.checkpoints)
        assert version is not None
        return version.header.version

    def finished(self) -> dict[str, Any]:
        """The content of `.finished`."""
        content = self.role.checkpoints.marker(FINISHED)
        assert content is not None
        return content

    def store_status(self) -> dict[str, Any]:
        """What the publisher says."""
        text = self.role.redis.get(RunKeys(self.role.run_id).store_status)
        return dict(json.loads(text)) if isinstance(text, bytes) else {}

    def events(self, kind: str) -> str:
        """The texts of all events of a kind."""
        return "\n".join(event.text for event in read_events(self.role.redis, self.role.run_id) if event.kind == kind)

    def weights(self, name: str) -> Columns:
        """Weights and normaliser of a checkpoint."""
        return state_arrays(decode_policy(self.role.checkpoints.load(name).objects[POLICY])[0])

    def end(self) -> None:
        """Stops the threads."""
        self.crash()
        for worker in (self.worker, *self._others):
            worker.stop("end of test")


def die(game: Game) -> None:
    """The worker is gone at once: it releases nothing and says nothing."""
    game.worker._heartbeat._stop.set()
    game.worker._sampler.close()


def replace_worker(game: Game) -> None:
    """The next incarnation joins."""
    game.worker = Worker(game._open(), 0)
    game.worker.start()


NewGame = Callable[[Config], Game]


def make_game(redis_server: RedisServer, folder: Path, config: Config) -> Game:
    """A new run on the shared Redis, trainer and worker started."""
    store, keys = folder / "store", folder / "keys.json"
    store.mkdir(exist_ok=True)
    keys.write_text(json.dumps({"redis_password": redis_server.password}))
    address = Address(f"t-{new_secret()[:12]}", redis_server.url, f"file://{store}", None, str(keys))
    first = open_role(config, address)
    create_flow(first)
    first.checkpoints.store.put(ENVIRONMENT, json.dumps(describe_environment(config).as_dict()).encode())
    return Game(lambda: open_role(config, address))


def small(**sections: Any) -> Config:
    """A small run with everything that is learnt beside the weights."""
    policy = {"hidden_sizes": [8], "normalise_observations": True, "normalise_rewards": True}
    return minimal_config(**({"policies": {"default": policy}, "stop_at": {"updates": 6}} | sections))


def balanced(game: Game) -> dict[str, Any]:
    """The books, after a look that they are right."""
    books = read_books(game.role.redis, game.role.run_id)
    assert all(line.balances for line in books.values()), books
    return {worker: line.as_dict() for worker, line in books.items()}
