"""Demonstrations of MountainCar-v0 for mountain_car_demonstrations.yaml: a program that pushes the way the car rolls.

`python examples/mountain_car_demonstrations.py mountain_car.csv` writes them as CSV (docs/guides/offline.md).
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium

COLUMNS = ["episode", "obs.0", "obs.1", "action", "reward", "terminated", "truncated", "next_obs.0", "next_obs.1"]


def episode(environment: gymnasium.Env, number: int) -> Iterator[list[object]]:
    """Yields an episode's rows. The program needs about 120 steps to the top, the best known policies about 100."""
    observation, _ = environment.reset(seed=number)
    over = False
    while not over:
        action = 2 if observation[1] >= 0 else 0
        after, reward, terminated, truncated, _ = environment.step(action)
        yield [number, *observation, action, reward, int(terminated), int(truncated), *after]
        observation, over = after, terminated or truncated


def write(path: Path, episodes: int = 20) -> None:
    """A header, then a row for each step."""
    environment = gymnasium.make("MountainCar-v0")
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for number in range(episodes):
            table.writerows(episode(environment, number))
    environment.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
