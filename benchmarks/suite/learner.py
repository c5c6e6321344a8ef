"""The learner alone: gradient steps a second of each algorithm, against plain loops of the same mathematics."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.kit.measure import Measure, Result
from benchmarks.kit.options import Options, in_turns
from benchmarks.suite.plain_learners import NatureNetwork, PlainDQN, PlainMemory, PlainPPO, PlainSAC, mlp
from stagecoach.shared.base.process import keep_freed_memory
from stagecoach.shared.config.algorithms.registry import ALGORITHMS
from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.fragment import expected_columns
from stagecoach.shared.experience.spaces import Columns, Leaf, PolicySpaces, SpaceSpec
from stagecoach.shared.policies.registry import build_policies
from stagecoach.trainer_node.learning.building_blocks.compilation import has_compiler
from stagecoach.trainer_node.learning.building_blocks.interface import Experience, Setting
from stagecoach.trainer_node.learning.learner import make_algorithm

_SECONDS, _QUICK_SECONDS = 1.0, 0.01
_STEPS, _SLOTS = 64, 64
_MEMORY_STEPS, _MEMORY_SLOTS = 4, 32
_SHARE, _IMAGE_SHARE = 0.5, 0.0625
_CAPACITY, _IMAGE_CAPACITY = 65_536, 4_096

_POLE = PolicySpaces(
    SpaceSpec((Leaf("", "box", (4,), "float32", low=(-5.0,), high=(5.0,)),), 0),
    SpaceSpec((Leaf("", "discrete", (), "int64", (2,), (0,)),), 0),
)
_CHEETAH = PolicySpaces(
    SpaceSpec((Leaf("", "box", (17,), "float32", low=(-5.0,), high=(5.0,)),), 0),
    SpaceSpec((Leaf("", "box", (6,), "float32", low=(-1.0,), high=(1.0,)),), 0),
)
_FRAMES = PolicySpaces(
    SpaceSpec((Leaf("", "box", (4, 84, 84), "uint8", low=(0.0,), high=(255.0,)),), 0),
    SpaceSpec((Leaf("", "discrete", (), "int64", (6,), (0,)),), 0),
)
_COMMON = {"max_grad_norm": 0.5, "entropy_coefficient": 0.01, "learning_rate": 3e-4}
_CLIPPED = _COMMON | {"epochs": 4}
_REPLAY = {"gradient_steps_per_env_step": _SHARE, "replay_buffer": {"kind": "uniform", "capacity": _CAPACITY}}
_FRAMES_REPLAY = {
    "gradient_steps_per_env_step": _IMAGE_SHARE,
    "replay_buffer": {"kind": "uniform", "capacity": _IMAGE_CAPACITY},
}

_OURS: dict[str, tuple[PolicySpaces, tuple[int, ...], dict[str, Any]]] = {
    "PPO, minibatch 128": (_POLE, (64, 64), {"name": "ppo", "minibatch_size": 128, **_CLIPPED}),
    "PPO, minibatch 512": (_POLE, (64, 64), {"name": "ppo", "minibatch_size": 512, **_CLIPPED}),
    "PPO, minibatch 1024": (_POLE, (64, 64), {"name": "ppo", "minibatch_size": 1024, **_CLIPPED}),
    "APPO, minibatch 512": (_POLE, (64, 64), {"name": "appo", "minibatch_size": 512, **_CLIPPED}),
    "A2C, 4096 at once": (_POLE, (64, 64), {"name": "a2c", **_COMMON}),
    "DQN": (_POLE, (64, 64), {"name": "dqn", "minibatch_size": 64, **_REPLAY}),
    "DQN, images": (_FRAMES, (64,), {"name": "dqn", "minibatch_size": 32, **_FRAMES_REPLAY}),
    "SAC, 64×64": (_CHEETAH, (64, 64), {"name": "sac", "minibatch_size": 256, **_REPLAY}),
    "SAC, 256×256": (_CHEETAH, (256, 256), {"name": "sac", "minibatch_size": 256, **_REPLAY}),
    "TD3, 64×64": (_CHEETAH, (64, 64), {"name": "td3", "minibatch_size": 256, **_REPLAY}),
}
_PLAIN = {
    "PPO, minibatch 128": lambda: _plain_ppo(128, fused=False),
    "PPO, minibatch 512": lambda: _plain_ppo(512, fused=False),
    "PPO, minibatch 1024": lambda: _plain_ppo(1024, fused=False),
    "DQN": lambda: _plain_dqn(),
    "DQN, images": lambda: _plain_images(),
    "SAC, 64×64": lambda: _plain_sac((64, 64)),
    "SAC, 256×256": lambda: _plain_sac((256, 256)),
}
"""The yardsticks: a plain loop for each of these."""
_COMPILED = (
    "PPO, minibatch 512",
    "PPO, minibatch 1024",
    "APPO, minibatch 512",
    "DQN",
    "DQN, images",
    "SAC, 64×64",
    "SAC, 256×256",
)
"""With `trainer.compile` as well."""


def measure(options: Options) -> Result:
    """All lines, each beside its plain loop."""
    seconds, calls = _QUICK_SECONDS if options.quick else _SECONDS, {}
    with _as_a_trainer():
        for name in _OURS:
            if options.wants(name):
                calls[name] = _line(_ours(name), seconds)
                if name in _PLAIN:
                    calls[f"{name}: plain loop"] = _line(_PLAIN[name](), seconds)
        fused = "PPO, minibatch 512: plain loop, fused Adam"
        if options.wants(fused):
            calls[fused] = _line(_plain_ppo(512, fused=True), seconds)
        medium = "SAC, 256×256: matmul_precision medium"
        if options.wants(medium):
            calls[medium] = _line(_ours("SAC, 256×256"), seconds, precision="medium")
        for name in _compiled(options):
            if options.wants(f"{name}: compiled"):
                update = _ours(name, compile=True)
                update()  # compiles
                calls[f"{name}: compiled"] = _line(update, seconds)
        samples = in_turns(options, calls)
    return Result(
        benchmark="learner",
        question=(
            "How many gradient steps a second of processor time does each algorithm make, alone in a process with one "
            "PyTorch thread, from experience that is there already? Everything of an update counts: taking columns "
            "over, values, advantages, memory, drawing minibatches, forward, loss, backward, clipping, Adam, target "
            "networks and figures. The yardstick is benchmarks/suite/plain_learners.py: the same by hand, with "
            "PyTorch's own Adam."
        ),
        measures=[_measure(name, values, samples) for name, values in samples.items()],
        settings={
            "ours": {name: {"hidden_sizes": hidden, **fields} for name, (_, hidden, fields) in _OURS.items()},
            "fragment, on-policy (steps × slots)": [_STEPS, _SLOTS],
            "fragment, replay (steps × slots; a plain loop gets the same)": [_MEMORY_STEPS, _MEMORY_SLOTS],
            "seconds per sample": seconds,
            "torch_threads": 1,
        },
        remarks=[
            "The plain loops leave out what ours has to know as well: masks, truncation, the last observations of "
            "truncated episodes, and the norm of the gradients and the TD errors as figures.",
            "`compiled` is ours with trainer.compile; the time it takes to compile, once for each start, is not in it.",
            "The plain loops have distributions without checks of their arguments, and the same allocator settings.",
            "Adam in the plain loops is torch.optim.Adam as it is by default; one line shows it with fused=True.",
        ],
    )


def _measure(name: str, values: list[float], samples: dict[str, list[float]]) -> Measure:
    unit, plain = "gradient steps/s", f"{name}: plain loop"
    if plain in samples:
        return Measure(name, unit, values, against=plain, aim=1.1)
    plainly, _, way = name.partition(": ")
    if way in ("matmul_precision medium", "compiled") and plainly in samples:
        return Measure(name, unit, values, against=plainly)
    if "fused" in name and "PPO, minibatch 512: plain loop" in samples:
        return Measure(name, unit, values, against="PPO, minibatch 512: plain loop")
    return Measure(name, unit, values)


def _compiled(options: Options) -> tuple[str, ...]:
    """Of which ours is compiled as well: of none where nothing can be."""
    if not has_compiler():
        return ()
    return _COMPILED[:1] if options.quick else _COMPILED


def _line(update: Callable[[], int], seconds: float, precision: str = "highest") -> Callable[[], float]:
    def call() -> float:
        torch.set_float32_matmul_precision(precision)
        try:
            return _per_processor_second(update, seconds)
        finally:
            torch.set_float32_matmul_precision("highest")

    return call


def _per_processor_second(update: Callable[[], int], seconds: float) -> float:
    """Gradient steps a second of processor time: one thread computes, and other processes may be running."""
    began, done = time.process_time(), 0
    while (passed := time.process_time() - began) < seconds:
        done += update()
    return done / passed


@contextmanager
def _as_a_trainer() -> Iterator[None]:
    """One thread, and an allocator that keeps freed memory as a trainer's does; for the plain loops too."""
    keep_freed_memory()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _ours(name: str, *, compile: bool = False) -> Callable[[], int]:
    """What makes one update and answers its gradient steps."""
    spaces, hidden, fields = _OURS[name]
    config = ALGORITHMS[fields["name"]].model_validate(fields)
    remembers = "replay_buffer" in fields
    activation = "relu" if remembers else "tanh"
    network = PolicyConfig.model_validate({"hidden_sizes": hidden, "activation": activation})
    policy = build_policies({"default": spaces}, {"default": network}, config, seed=1)["default"]
    steps, slots = (_MEMORY_STEPS, _MEMORY_SLOTS) if remembers else (_STEPS, _SLOTS)
    algorithm = make_algorithm(policy, config, Setting(torch.device("cpu"), 1, steps, slots, compile=compile))
    fragments, counters = itertools.cycle(_fragments(spaces, steps, slots)), Counters()

    def update() -> int:
        counters.env_steps += steps * slots
        metrics = algorithm.update([Experience("worker-0:0.0", next(fragments))], counters)
        counters.updates += 1
        return int(metrics["train/gradient_steps"])

    return update


def _fragments(spaces: PolicySpaces, steps: int, slots: int) -> list[Columns]:
    """Four of random numbers, read-only as they come from the log."""
    random = np.random.default_rng(1)
    return [_fragment(spaces, steps, slots, random) for _ in range(4)]


def _fragment(spaces: PolicySpaces, steps: int, slots: int, random: np.random.Generator) -> Columns:
    columns: Columns = {}
    for name, (shape, dtype) in expected_columns(spaces, steps, slots).items():
        shape = tuple(max(size, 0) for size in shape)
        whole = dtype.kind in "ui"
        columns[name] = (random.integers(0, 255, shape) if whole else random.normal(size=shape)).astype(dtype)
    for leaf in spaces.action.leaves:
        shape = (steps, slots, *leaf.shape)
        drawn = random.uniform(-1, 1, shape) if leaf.kind == "box" else random.integers(leaf.nvec[0], size=shape)
        columns[leaf.column("action")] = drawn.astype(leaf.column_dtype)
    columns["log_prob"] = np.full((steps, slots), np.log(0.5), np.float32)
    columns["mask"], columns["truncated"] = np.ones((steps, slots), np.bool_), np.zeros((steps, slots), np.bool_)
    columns["terminated"] = random.random((steps, slots)) < 0.01
    for array in columns.values():
        array.flags.writeable = False
    return columns


def _plain_ppo(minibatch: int, *, fused: bool) -> Callable[[], int]:
    learner, fragments = (
        PlainPPO(4, 2, (64, 64), minibatch, fused=fused),
        itertools.cycle(_fragments(_POLE, _STEPS, _SLOTS)),
    )
    return lambda: learner.update(next(fragments))


def _plain_dqn() -> Callable[[], int]:
    return _plain_q(_POLE, mlp(4, (64, 64), 2, nn.ReLU), _CAPACITY, 64, _SHARE)


def _plain_images() -> Callable[[], int]:
    return _plain_q(_FRAMES, NatureNetwork(64, 6), _IMAGE_CAPACITY, 32, _IMAGE_SHARE)


def _plain_q(
    spaces: PolicySpaces, network: nn.Module, capacity: int, minibatch: int, share: float
) -> Callable[[], int]:
    made = _fragments(spaces, _MEMORY_STEPS, _MEMORY_SLOTS)
    learner = PlainDQN(network, PlainMemory(capacity, made[0]["obs"], made[0]["action"]), minibatch)
    fragments = itertools.cycle(made)
    return lambda: learner.update(next(fragments), int(_MEMORY_STEPS * _MEMORY_SLOTS * share))


def _plain_sac(hidden: tuple[int, ...]) -> Callable[[], int]:
    made = _fragments(_CHEETAH, _MEMORY_STEPS, _MEMORY_SLOTS)
    memory = PlainMemory(_CAPACITY, made[0]["obs"], made[0]["action"])
    learner, fragments = PlainSAC(17, 6, hidden, memory, 256), itertools.cycle(made)
    return lambda: learner.update(next(fragments), int(_MEMORY_STEPS * _MEMORY_SLOTS * _SHARE))
