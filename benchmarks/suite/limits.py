"""What the machine can do at most, each thing alone: `python -m benchmarks limits`.

Environments, networks, Redis, the store and memory, without the product around them where that is possible; next to
them the product's sampler, and what the product itself costs per transition beside environment, policy and gradient.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import torch

from benchmarks.kit.measure import Measure, Result
from benchmarks.kit.options import Options, in_turns, per_second
from benchmarks.suite.framework_cost import TRAINER_PARTS, WORKER_PARTS, FrameworkCost
from benchmarks.suite.limits_alone import Work, acting, cartpole, learning, transport

_SECONDS = 0.6
_QUICK_SECONDS = 0.02
QUESTION = (
    "What this machine can do at most, each thing alone, in one thread; and what the framework costs per transition "
    "beside the environment's step, the policy and the gradient, in processor time of the real loop."
)


def measure(options: Options) -> Result:
    """All lines; the cost of the framework in a run of its own, whose stretches are the repeats."""
    seconds = _QUICK_SECONDS if options.quick else _SECONDS
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ExitStack() as running:
            work: list[Work] = [
                *acting(),
                *learning(options.quick),
                *running.enter_context(transport()),
            ]
            wanted = {each.what: each for each in work if options.wants(each.what)}
            samples = in_turns(options, {what: partial(_speed, each, seconds) for what, each in wanted.items()})
            for each in wanted.values():
                each.close()
    finally:
        torch.set_num_threads(before)
    measures = [
        Measure(what, wanted[what].unit, found, against=_among(wanted[what].against, wanted))
        for what, found in samples.items()
    ]
    if options.wants("framework"):
        measures += _framework(options)
    settings = {
        "torch threads": 1, "seconds for each sample": seconds, "network": "two tanh layers of 64",
        "framework, per transition": cartpole(options.quick).model_dump(
            mode="json", include={"environment", "algorithm", "rollout"}, exclude_unset=True
        ),
    }  # fmt: skip
    return Result("limits", QUESTION, measures, settings, remarks=REMARKS)


REMARKS = (
    "framework: processor time of the worker's whole process (heartbeat and watchdog with it), less that of "
    "gymnasium's vector step and reset, and of the policy's forward pass, drawing and log-probabilities; and of the "
    "trainer's process, less the algorithm's update. All are clocked in the same stretch of the same run. What "
    "the clocks themselves take is a line of its own and is not subtracted.",
    "framework: the guard around each copy of an environment, which says which one failed, lies within gymnasium's "
    "vector step; it is clocked alone, and added.",
)


def _speed(work: Work, seconds: float) -> float:
    return per_second(work.call, seconds)


def _among(against: str, wanted: dict[str, Work]) -> str:
    return against if against in wanted else ""


def _framework(options: Options) -> list[Measure]:
    """A run of a worker and a trainer; each repeat is a stretch of it."""
    found = FrameworkCost.of_run(options)
    lines = []
    for who, parts, aim in (("worker", WORKER_PARTS, 1.0), ("trainer", TRAINER_PARTS, 0.5)):
        samples = found.of(who)
        lines += [
            Measure(f"{who}: {part}", "µs per transition", [sample[part] for sample in samples], better="less")
            for part in parts
        ]
        lines.append(
            Measure(
                f"{who}: framework",
                "µs per transition",
                [sample["framework"] for sample in samples],
                aim=aim,
                better="less",
            )
        )
    return lines
