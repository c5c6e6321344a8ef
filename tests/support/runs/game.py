"""A small run for tests: real Redis, a folder store, one trainer and one real worker, stepped in turn."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stagecoach.rollout_worker.evaluator import Evaluator
from stagecoach.rollout_worker.sampling.dataset_sampler import DatasetSampler
from stagecoach.rollout_worker.sampling.sampler import Sampler
from stagecoach.rollout_worker.worker import Worker
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.spaces import Columns
from stagecoach.shared.policies.serialization import decode_policy, state_arrays
from stagecoach.shared.protocol.events import read_events
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.ledger import read_accounting
from stagecoach.shared.protocol.policy_board import PolicyBoard, PolicyVersion
from stagecoach.shared.runtime.run_context import RunContext, open_run_context
from stagecoach.shared.storage.checkpoint_store import FINISHED, Checkpoint
from stagecoach.trainer_node.recovery.incarnation import Incarnation
from stagecoach.trainer_node.replay.comparison import Replayed, replay
from stagecoach.trainer_node.trainer import Trainer
from tests.conftest import RedisServer, minimal_config
from tests.support.runs.builders import folder_address, make_run
from tests.support.runs.checkpoints import key_of

POLICY = "default/policy.safetensors"
STEPS_PER_UPDATE = 8 * 4 * 2
"""Transitions in an update of `small`."""
KEEP = {"every": "2 updates", "keep_last": 9}
"""Checkpoints, all of them."""


class Game:
    """One run: its roles, its trainer (the present one) and its worker."""

    folder: Path
    """Folder of the run in its store."""

    def __init__(self, open_: Callable[[], RunContext]) -> None:
        self.open = open_
        """Another connection to the run."""
        self.role = open_()
        self.trainer = Trainer.start(Incarnation(open_()))
        self.worker = Worker(open_(), 0)
        self.others: list[Worker] = []
        self.run_folder: str | None = None
        """Folder into which the next trainers write metrics."""
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

    def play_to(self, version: int, durable: bool = False) -> None:
        """Plays on to this version; if `durable`, until the store has what was submitted as well."""
        self.play(lambda: self.trainer.version >= version)
        if durable:
            self.durable()

    def another_worker(self, index: int) -> Worker:
        worker = Worker(self.open(), index)
        worker.start()
        self.others.append(worker)
        return worker

    def crash(self) -> None:
        """The trainer is gone: nothing is finished, nothing is said."""
        self.trainer.incarnation.closing.close()
        self.trainer.incarnation.heartbeat.stop("", last_beat=False)

    def restart(self) -> None:
        """A new trainer takes up the run; one that fails to is gone."""
        incarnation = Incarnation(self.open(), self.run_folder)
        with contextlib.ExitStack() as stack:
            stack.callback(incarnation.heartbeat.stop, "", last_beat=False)
            stack.push(incarnation.closing)
            self.trainer = Trainer.start(incarnation)
            stack.pop_all()

    def replace_trainer(self) -> None:
        self.crash()
        self.restart()

    def lose_worker(self) -> None:
        """The worker is gone at once, and the next incarnation joins."""
        die(self)
        replace_worker(self)

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
        objects = sorted(self.latest().objects.items())
        policies = [data for name, data in objects if name.endswith("policy.safetensors")]
        return hashlib.sha256(b"".join(policies)).hexdigest()

    def latest(self) -> Checkpoint:
        found = self.role.checkpoints.load_latest()
        assert found is not None
        return found

    def durable(self) -> None:
        """Waits until the store has what was submitted."""
        self.trainer.state.writer.wait_idle(100)

    def board(self) -> PolicyVersion:
        found = PolicyBoard(self.role.redis, self.role.run_id).fetch(self.role.checkpoints)
        assert found is not None
        return found

    def board_version(self) -> int:
        return self.board().header.version

    def finished(self) -> dict[str, Any]:
        content = self.role.checkpoints.marker(FINISHED)
        assert content is not None
        return content

    def events(self, kind: str) -> str:
        return "\n".join(event.text for event in read_events(self.role.redis, self.role.run_id) if event.kind == kind)

    def weights(self, name: str) -> Columns:
        return state_arrays(decode_policy(self.role.checkpoints.load(name).objects[POLICY])[0])

    def end(self) -> None:
        self.crash()
        for worker in (self.worker, *self.others):
            worker.stop("end of test")


def die(game: Game) -> None:
    """The worker is gone at once: it releases nothing and says nothing."""
    game.worker.heartbeat.stop("", last_beat=False)
    game.worker.episodes.sampler.close()


class Death(BaseException):
    """The process is gone; nothing in the product may catch it."""


def die_in_a_fragment(game: Game) -> None:
    """The worker is gone after five steps of a fragment that it has begun."""

    def dying(sample: Callable[..., Any]) -> Callable[..., Any]:
        def sample_some(self: Any, policies: Any, exploration: Any, steps: int) -> None:
            sample(self, policies, exploration, 5)
            raise Death

        return sample_some

    with pytest.MonkeyPatch.context() as patch:
        for kind in (Sampler, DatasetSampler):
            patch.setattr(kind, "sample", dying(kind.sample))
        with pytest.raises(Death):
            game.worker.step(0)


def replace_worker(game: Game) -> None:
    """The next incarnation joins."""
    game.worker = Worker(game.open(), 0)
    game.worker.start()


def evaluate_due(game: Game) -> int:
    """Plays all that is due, with an evaluator that ends afterwards; returns how many policies that were."""
    evaluator, count = Evaluator(game.open()), 0
    evaluator.start()
    try:
        while evaluator.step(0) == "evaluated":
            count += 1
    finally:
        evaluator.stop("end of test")
    return count


@contextlib.contextmanager
def published(make_role: Callable[..., RunContext], config: Config) -> Iterator[Trainer]:
    """A trainer that has put version 0 of its run on the board."""
    trainer = Trainer.start(Incarnation(make_role(config)))
    try:
        yield trainer
    finally:
        trainer.state.writer.close()
        trainer.incarnation.heartbeat.stop("the test is over")


NewGame = Callable[[Config], Game]


def make_game(redis_server: RedisServer, folder: Path, config: Config, **address_fields: str) -> Game:
    """A new run on the shared Redis, trainer and worker started."""
    address = dataclasses.replace(folder_address(redis_server, folder), **address_fields)
    make_run(config, address).redis.close()
    game = Game(lambda: open_run_context(config, address))
    game.folder = folder / "store" / address.run_id
    return game


def small(**sections: Any) -> Config:
    """A small run with everything that is learned beside the weights."""
    policy = {"hidden_sizes": [8], "normalize_observations": True, "normalize_rewards": True}
    return minimal_config(**({"policies": {"default": policy}, "stop_at": {"updates": 6}} | sections))


def balanced(game: Game) -> dict[str, Any]:
    """The accounting, after a look that they are right."""
    accounting = read_accounting(game.role.redis, game.role.run_id)
    assert all(line.balances for line in accounting.values()), accounting
    return {worker: line.as_dict() for worker, line in accounting.items()}


def archived(**sections: Any) -> Any:
    """The small run, with all of its log kept."""
    return small(**({"archive": "all", "checkpoint": KEEP} | sections))


def replayed(game: Game, start: str = "start", goal: str | None = None) -> Replayed:
    """A replay between two checkpoints of the game's run; to the last one where no goal is given."""
    return replay(
        game.role.checkpoints,
        game.role.config,
        game.role.description(),
        start,
        goal or game.role.checkpoints.names()[-1],
    )


def ends_with(game: Game) -> dict[str, str]:
    """Plays to the end; SHA-256 of every object of the last checkpoint but the accounting of who restarted when."""
    game.finish()
    objects = game.latest().objects
    names = [name for name in objects if name.endswith((".algorithm.safetensors", "policy.safetensors"))]
    found = {name: hashlib.sha256(objects[name]).hexdigest() for name in names}
    assert len(found) >= 2
    return found


def damage(game: Game, name: str) -> None:
    """One byte of a checkpoint's policy is another."""
    key = key_of(game.role.checkpoints, name, POLICY)
    data = bytearray(game.role.checkpoints.store.get(key))
    data[-1] ^= 1
    game.role.checkpoints.store.put(key, bytes(data))


def dumped_redis(game: Game) -> dict[bytes, bytes]:
    """All that Redis knows of the run, for `restore_redis`."""
    redis: Any = game.role.redis
    return {key: redis.dump(key) for key in redis.scan_iter(f"{RunKeys(game.role.run_id).prefix}*")}


def restore_redis(game: Game, keys: dict[bytes, bytes]) -> None:
    """Redis as it was when these keys were dumped."""
    prefix = RunKeys(game.role.run_id).prefix
    for key in game.role.redis.scan_iter(f"{prefix}*"):
        game.role.redis.delete(key)
    for key, value in keys.items():
        game.role.redis.restore(key, 0, value, replace=True)  # a heartbeat may have come meanwhile


def goes_on_exactly(new_game: NewGame, config: Config) -> Game:
    """A run that is lost at each version ends as one that is not, and so does its replay (needs `archive=all`).

    Returns the run that was lost.
    """
    first = new_game(config)
    first.play_to(3)
    taken = first.trainer.state.snapshot()
    at_once = first.trainer.state.new_snapshot().checkpoint.objects
    whole = ends_with(first)
    assert taken.checkpoint.objects == at_once  # encoded when training had gone on to the end
    game = new_game(config)
    for version in range(1, config.stop_at.updates or 7):
        game.play_to(version)
        if version == 3:
            die_in_a_fragment(game)
        if version == 4:
            game.durable()  # else the last checkpoint is older, or still on its way
        game.lose()
    assert ends_with(game) == whole
    assert "begins new episodes" not in game.events("environment")
    found = replayed(game)
    assert found.equal, found.different
    balanced(game)
    return game


def asks(game: Game) -> str:
    """Reply to its worker's next claim, which may be sent again."""
    worker = game.worker
    return game.role.flow.claim(worker.id, worker.incarnation, worker.claims.seq).reply


def push_garbage(game: Game) -> None:
    """The worker's next fragment is none: the trainer will drop it."""
    worker, seq = game.worker, game.worker.claims.seq
    claim = game.role.flow.claim(worker.id, worker.incarnation, seq)
    assert claim.granted
    assert game.role.log().push(worker.id, worker.incarnation, seq, claim.epoch, 32, b"garbage") == "pushed"
    worker.claims.seq += 1
