"""Random walks over the protocol's real scripts: long orders of steps, with more parties and faults than a search of
every order can hold. A walk is decided by its seed; a violation names seed and steps.

`python -m tests.support.protocol.random_walks --minutes 30` (as `make walks` does).
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from stagecoach.shared.runtime.run_context import RunContext, open_run_context
from tests.support.protocol.search import Image, Next, Search, Violation, World
from tests.support.runs.builders import folder_address, make_run
from tests.support.runs.small_run import small_config
from tests.support.services.own_redis import OwnRedis

SETTINGS = [(1, 0), (2, 0), (3, 0), (1, 1), (2, 1)]
"""Fragments per update, and policy lag."""
STEPS = 120
_RARE = 0.12
"""Probability of a fault where one is possible."""
_MOST_TRAINERS, _MOST_LATE, _MOST_PASTS = 3, 4, 3


class RandomWalk(Search):
    """One walk of three workers over a run's Redis."""

    def __init__(self, role: RunContext, seed: int) -> None:
        super().__init__(role, workers=3)
        self._random, self._pasts = random.Random(seed), list[Image]()

    def walk(self, steps: int) -> list[str]:
        """Takes so many steps, each checked; then the run must continue. Raises `Violation` with the steps."""
        world, way = self.beginning(faults=1 << 30), list[str]()
        try:
            for number in range(steps):
                name, step, cost = self._choose([*self.steps(world)])
                way.append(name)
                world = self._after(world, step, cost)
                self.check(world)
                if number % 40 == 39:
                    self.goes_on(world.copy())
                world.trainers = [each for each in world.trainers if each.alive] or world.trainers[-1:]
                world.trainers, world.late = world.trainers[-_MOST_TRAINERS:], world.late[-_MOST_LATE:]
            self._enter(world.redis)
            self.goes_on(world)
        except Exception as error:
            raise Violation(f"{error}, after: {'; '.join(way)}") from error
        return way

    def _choose(self, ways: list[Next]) -> Next:
        faults, others = [way for way in ways if way[2]], [way for way in ways if not way[2]]
        return self._random.choice(faults if (faults and self._random.random() < _RARE) or not others else others)

    def steps(self, world: World) -> Iterator[Next]:
        """Also garbage in the log, releases, a trainer that never hears its epoch, and several older files."""
        skipped = {"Redis writes its file", "Redis is rolled back"}
        yield from (way for way in super().steps(world) if way[0] not in skipped)
        yield "garbage is put into the log", self._puts_garbage, 1
        for worker in world.workers:
            yield f"the claims of {worker.name} are released", partial(self._releases, worker=worker.name), 1
            if worker.hand is not None and worker.alive:
                index = world.workers.index(worker)
                yield f"{worker.name} pushes garbage", partial(self._pushes_garbage, index=index), 1
        yield "a trainer takes over, unheard", self._takes_over_unheard, 1
        if len(world.trainers) >= 2:
            yield "another trainer starts", self._starts, 1
        yield "Redis writes its file", self._writes_a_file, 0
        for number in range(len(self._pasts)):
            yield f"Redis is rolled back to file {number}", partial(self._is_rolled_back_to, number=number), 1

    def _puts_garbage(self, world: World) -> None:
        garbage: Any = {"worker": "worker-0", "incarnation": "0", "seq": "0", "fragment": "garbage"}
        self.role.redis.xadd(self._keys.log, garbage)

    def _pushes_garbage(self, world: World, index: int) -> None:
        """A fragment that cannot be decoded, in the place of the one in its hand."""
        worker = world.workers[index]
        hand = worker.hand
        assert hand is not None
        blob = f"garbage {hand.act}".encode()
        self._acts[blob] = f"{hand.act} as garbage"
        encode, self._encode = self._encode, lambda *_: blob  # type: ignore[assignment]
        try:
            self._pushes(world, index)
        finally:
            self._encode = encode

    def _releases(self, world: World, worker: str) -> None:
        self._flow.release(worker)

    def _takes_over_unheard(self, world: World) -> None:
        self._flow.take_over(max(trainer.epoch for trainer in world.trainers))

    def _writes_a_file(self, world: World) -> None:
        self._pasts = [*self._pasts[-_MOST_PASTS + 1 :], world.redis]

    def _is_rolled_back_to(self, world: World, number: int) -> None:
        world.past = self._pasts[number]
        self._is_rolled_back(world)


def walk_for(seconds: float, first_seed: int, role_of: Any, steps: int = STEPS) -> int:
    """Walks until the time is over; returns how many. Raises `Violation`, which names the seed."""
    deadline, seed = time.monotonic() + seconds, first_seed
    while time.monotonic() < deadline:
        walk(seed, role_of, steps)
        seed += 1
    return seed - first_seed


def walk(seed: int, role_of: Any, steps: int = STEPS) -> list[str]:
    """The walk of one seed, over a new run."""
    role = role_of(small_config(*SETTINGS[seed % len(SETTINGS)]))
    try:
        return RandomWalk(role, seed).walk(steps)
    except Violation as error:
        raise Violation(f"seed {seed}: {error}") from error


def main() -> int:
    """Walks for so many minutes, or the one of a seed."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.protocol.random_walks", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--first-seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    logging.disable()  # of what is dropped
    with tempfile.TemporaryDirectory() as folder, closing(Server(Path(folder))) as server:
        try:
            if options.seed is not None:
                print("; ".join(walk(options.seed, server.role)))
                return 0
            walks = walk_for(60 * options.minutes, options.first_seed, server.role)
        except Violation as error:
            print(error, file=sys.stderr)
            return 1
    print(f"{walks} walks of {STEPS} steps in {options.minutes:g} minutes from seed {options.first_seed}: no violation")
    return 0


class Server:
    """A Redis of its own, which holds the run of one walk."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._redis = folder, OwnRedis(folder / "redis", settings={"appendonly": "no"})

    def role(self, config: Any) -> RunContext:
        self._redis.command("FLUSHALL")
        address = folder_address(self._redis.through(self._redis.port), self._folder)
        make_run(config, address).redis.close()
        return open_run_context(config, address)

    def close(self) -> None:
        self._redis.kill()


if __name__ == "__main__":
    sys.exit(main())
