"""The floor of a task: what nobody can avoid, whose environment and networks these are, and how fast one would be who
pays nothing else: `python -m benchmarks.contest.floor TASK SECONDS` prints env steps/s.

Three costs of a transition, each measured as processor time on one core with one thread: (1) the bare environment's
`step` in a loop (the own vector form, where the task has it), without wrappers and vectors; (2) one pass of the acting
network for a row of a batch of all environments, by torch without gradients or by NumPy, whichever is cheaper; (3)
forward, backward and fused Adam of the networks alone for as many rows as each transition is learned from, with the
sum of the outputs for a loss. The floor is two cores over their sum, as if nothing ever waited.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from benchmarks.contest import contestants
from benchmarks.contest.contestants import Task
from benchmarks.contest.programs.images import environment
from benchmarks.suite.plain_learners import mlp

CORES = 2
TASKS = {
    task.name: task
    for task in (
        contestants.CARTPOLE, contestants.NATIVE, contestants.CHEETAH_PPO, contestants.CHEETAH_SAC, contestants.IMAGES
    )
}  # fmt: skip


def costs(task: Task, seconds: float) -> dict[str, float]:
    """Processor seconds of a transition: environment, acting, learning."""
    torch.set_num_threads(1)
    return {
        "environment": (_native if task.native else _stepped)(task, seconds),
        "acting": _acting(task, seconds),
        "learning": _learning(task, seconds),
    }


def _each(call: Callable[[], object], count: int, seconds: float) -> float:
    """Processor seconds of one of the `count` things that a call does; the least of several windows."""
    call()
    least, until = float("inf"), time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.process_time()
        call()
        least = min(least, (time.process_time() - began) / count)
    return least


def _stepped(task: Task, seconds: float) -> float:
    env = environment(task.environment).unwrapped
    env.reset(seed=0)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(500)]

    def steps() -> None:
        for action in actions:
            if env.step(action)[2]:
                env.reset()

    return _each(steps, len(actions), seconds)


def _native(task: Task, seconds: float) -> float:
    vector = gym.make_vec(task.environment, task.envs, vectorization_mode="vector_entry_point")
    vector.reset(seed=0)
    actions = np.zeros(task.envs, np.int64)

    def steps() -> None:
        for number in range(50):
            actions[:] = number % 2
            vector.step(actions)

    return _each(steps, 50 * task.envs, seconds)


def _networks(task: Task) -> tuple[nn.Module, list[nn.Module], int]:
    """Actor, critics, and the width of the observations (0 for images)."""
    env = environment(task.environment)
    seen = 0 if task.environment == "images" else int(np.prod(env.observation_space.shape or ()))
    space: Any = env.action_space
    outputs = int(space.n) if hasattr(space, "n") else int(space.shape[0])
    if not seen:
        body = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
            nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, outputs + 1),
        )  # fmt: skip
        return body, [], 0
    if task.algorithm == "ppo":
        return mlp(seen, task.layers, outputs, nn.Tanh), [mlp(seen, task.layers, 1, nn.Tanh)], seen
    critics: list[nn.Module] = [mlp(seen + outputs, task.layers, 1, nn.ReLU) for _ in range(2)]
    return mlp(seen, task.layers, 2 * outputs, nn.ReLU), critics, seen


def _input(task: Task, rows: int, width: int) -> torch.Tensor:
    return torch.rand(rows, width) if width else torch.randint(0, 256, (rows, 4, 84, 84)).float() / 255


def _acting(task: Task, seconds: float) -> float:
    actor, _, width = _networks(task)
    seen = _input(task, task.envs, width)

    @torch.no_grad()
    def by_torch() -> None:
        for _ in range(10):
            actor(seen)

    found = [_each(by_torch, 10 * task.envs, seconds / 2)]
    if width:
        layers = [one for one in actor.modules() if isinstance(one, nn.Linear)]
        weights = [(one.weight.detach().numpy().T.copy(), one.bias.detach().numpy()) for one in layers]
        rows = seen.numpy()

        def by_numpy() -> None:
            for _ in range(10):
                now = rows
                for number, (weight, bias) in enumerate(weights):
                    now = now @ weight + bias
                    if number + 1 < len(weights):
                        now = np.tanh(now) if task.algorithm == "ppo" else np.maximum(now, 0)

        found.append(_each(by_numpy, 10 * task.envs, seconds / 2))
    return min(found)


def _learning(task: Task, seconds: float) -> float:
    """SAC: actor and both critics once each, with gradients; and the targets' two passes and the actor's without."""
    actor, critics, width = _networks(task)
    seen = _input(task, task.minibatch, width)
    inputs = [next(one.parameters()).shape[1] for one in critics]
    joined = [torch.rand(task.minibatch, size) for size in inputs]
    parameters = [value for one in (actor, *critics) for value in one.parameters()]
    adam = torch.optim.Adam(parameters, lr=1e-9, fused=True)

    def step() -> None:
        if task.algorithm == "sac":
            with torch.no_grad():
                actor(seen)
                for critic, both in zip(critics, joined, strict=True):
                    critic(both)
        adam.zero_grad()
        total = actor(seen).sum()
        for critic, both in zip(critics, joined, strict=True):
            total = total + critic(both).sum()
        total.backward()
        adam.step()

    one = _each(step, 1, seconds)
    return one if task.algorithm == "sac" else one * task.epochs / task.minibatch


def main() -> None:
    """Prints the floor and its parts as JSON."""
    found = costs(TASKS[sys.argv[1]], float(sys.argv[2]))
    print(json.dumps({"env steps/s": CORES / sum(found.values()), **found}))


if __name__ == "__main__":
    main()
