"""`scale`: what happens to env steps a second as workers, observations and networks grow, against arithmetic.

Real trainer, real Redis. Workers are real ones for observations and networks; for numbers of workers they are simulated
(benchmarks/rehearsal/crowd.py: everything but the acting, which is a pause). Each point is a run of its own.
(`python -m benchmarks.rehearsal` is another thing: a rehearsal in which workers come, go and die.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.kit.measure import Curve, Measure, Result
from benchmarks.kit.options import Options
from benchmarks.rehearsal.crowd import simulate
from benchmarks.suite.pinning import first_cores, on_cores
from benchmarks.suite.roles import Measured, Part, running, train, work
from stagecoach.shared.config.loading import parse_config

_CORES = 2
_FLOAT = 4
_THINK_SECONDS = 0.04
_CROWDS = 2
"""Processes that hold the simulated workers."""
_FRAGMENT_BYTES = 4 << 20
"""Of observations in a fragment, where one alone is not larger."""
_ONE_UPDATE_SECONDS = 180.0


@dataclass(frozen=True)
class Point:
    """One size, and what was measured there."""

    size: float
    run: Measured

    @property
    def cost(self) -> dict[str, float]:
        """Role → processor seconds for each env step."""
        return {role: 1e-6 * used for role, used in self.run.microseconds.items()}


@dataclass(frozen=True)
class Family:
    """One thing that grows."""

    name: str
    unit: str
    points: Sequence[Point]
    predicted: Callable[[float], tuple[float, str]]
    """Size → env steps/s by arithmetic, and what sets the limit there."""
    beyond: Sequence[float] = ()
    """Sizes that are only worked out."""

    def measures(self) -> list[Measure]:
        """A line for each size."""
        return [
            Measure(self._what(point), "env steps/s", [point.run.rate], note=self._note(point)) for point in self.points
        ]

    def curves(self) -> list[Curve]:
        """Measured and worked out, in one picture."""
        measured = [(point.size, point.run.rate) for point in self.points]
        sizes = [*(point.size for point in self.points), *self.beyond]
        worked_out = [(size, self.predicted(size)[0]) for size in sizes]
        picture = f"scale-{self.name.replace(' ', '-')}"
        return [
            Curve(picture, "measured", self.unit, "env steps/s", measured),
            Curve(picture, "by arithmetic", self.unit, "env steps/s", worked_out, dashed=True),
        ]

    def limits(self) -> dict[str, Any]:
        """Size → what was found there, the reasons behind the figures."""
        return {self._what(point): self._found(point) for point in self.points}

    def _what(self, point: Point) -> str:
        return f"{self.name}: {point.size:,.0f} {self.unit}"

    def _note(self, point: Point) -> str:
        rate, limit = self.predicted(point.size)
        return f"arithmetic: {rate:,.0f}, limited by {limit}"

    def _found(self, point: Point) -> dict[str, Any]:
        run = point.run
        return {
            "env steps/s": round(run.rate), "by arithmetic": round(self.predicted(point.size)[0]),
            "limit by arithmetic": self.predicted(point.size)[1],
            "cores used": {role: round(used / run.seconds, 2) for role, used in run.processor.items()},
            "most MB held": {role: held >> 20 for role, held in run.resident.items()},
            "MB/s into Redis": round(run.redis.bytes_in / run.seconds / 1e6, 2),
            "MB/s out of Redis": round(run.redis.bytes_out / run.seconds / 1e6, 2),
            "MB of a version": round(run.version_bytes / 1e6, 3),
            "versions/s": round(run.updates / run.seconds, 2),
        }  # fmt: skip


def slowest(cost: Mapping[str, float], cores: int) -> tuple[float, str]:
    """Processor seconds for each env step of each role → env steps/s at most, and whose time sets that."""
    role = max(cost, key=lambda name: cost[name])
    bounds = {f"the processor of one {role}": cost[role], f"{cores} cores for all": sum(cost.values()) / cores}
    limit = max(bounds, key=lambda name: bounds[name])
    return 1 / bounds[limit], limit


def straight(points: Sequence[Point], cores: int) -> Callable[[float], tuple[float, str]]:
    """Costs that are a constant and so much for each unit of size, by the smallest point and a middle one."""
    first, other = points[0], points[len(points) // 2]

    def predicted(size: float) -> tuple[float, str]:
        share = (size - first.size) / (other.size - first.size) if other is not first else 0.0
        cost = {
            role: max(first.cost[role], first.cost[role] + share * (other.cost.get(role, 0.0) - first.cost[role]))
            for role in first.cost
        }
        return slowest(cost, cores)

    return predicted


def config_of(environment: dict[str, Any], rollout: dict[str, Any], policy: dict[str, Any]) -> dict[str, Any]:
    """IMPALA: one gradient step for each batch, and acting beside learning."""
    return {
        "environment": environment,
        "rollout": {"max_log_bytes": 1 << 29, "lease_seconds": 120.0, **rollout},
        "policies": {"default": {"share_encoder": True, **policy}},
        "algorithm": {"name": "impala"},
        "checkpoint": {"every": "1000000 updates", "keep_last": 1},
        "evaluation": {"episodes": 1},
        "metrics": {"writers": []},
        "stop_at": {"updates": 10**9},
    }


def crowd_config(workers: int) -> dict[str, Any]:
    """64 × 8 steps of CartPole in a fragment, 16 fragments for an update, 64 that may be on their way."""
    rollout = {"workers": workers, "fragment_steps": 64, "fragments_per_update": 16, "max_policy_lag": 3}
    return config_of({"id": "CartPole-v1", "num_envs": 8}, rollout, {"hidden_sizes": [32]})


def observation_config(size: int) -> dict[str, Any]:
    """About 4 MB of observations in a fragment, or a few where one is larger; the network is one unit wide."""
    rows = max(4, min(4096, _FRAGMENT_BYTES // (_FLOAT * size)))
    copies = min(64, rows // 4)
    environment = {
        "id": "benchmarks.suite.environments:wide", "kwargs": {"size": size}, "vectorization": "native",
        "num_envs": copies,
    }  # fmt: skip
    rollout = {"workers": 1, "fragment_steps": rows // copies, "fragments_per_update": 1, "max_policy_lag": 1}
    return config_of(environment, rollout, {"hidden_sizes": [1]})


def network_config(parameters: int) -> dict[str, Any]:
    """32 steps of CartPole for an update, whatever the network: actor and critic have two layers each."""
    width = max(1, round((-7.5 + (56 + 2 * parameters) ** 0.5) / 2))
    environment = {"id": "CartPole-v1", "vectorization": "native", "num_envs": 8}
    rollout = {"workers": 1, "fragment_steps": 4, "fragments_per_update": 1, "max_policy_lag": 1}
    return config_of(environment, rollout, {"hidden_sizes": [width, width], "share_encoder": False})


@dataclass(frozen=True)
class Sizes:
    """What is measured, and for how long each."""

    workers: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    floats: Sequence[int] = (4, 64, 1_000, 16_000, 250_000, 1_000_000)
    parameters: Sequence[int] = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 30_000_000)
    parameters_beyond: Sequence[int] = (100_000_000,)
    """Worked out only: its checkpoint alone is 1.2 GB, and trainer, Redis and worker hold several copies of it."""
    seconds: float = 3.0


_QUICK = Sizes((1,), (4, 64), (1_000, 10_000), (100_000,), 0.3)


def measure(options: Options) -> Result:
    """All three families."""
    sizes = _QUICK if options.quick else Sizes()
    families = {"workers": by_workers, "observations": by_observations, "networks": by_networks}
    cores = first_cores(_CORES)
    with on_cores(*cores):
        found = [family(options, sizes) for name, family in families.items() if options.wants(name)]
    return Result(
        "scale",
        "How many env steps a second are learned from as workers, observations and networks grow, and what sets the "
        "limit? Each point is a run of its own, measured once, and arithmetic is from the processor times of some.",
        [line for family in found for line in family.measures()],
        settings={
            "cores": cores,
            "seconds of each point": sizes.seconds,
            "workers": {"config": crowd_config(1), "acting takes (s)": _THINK_SECONDS, "processes": _CROWDS},
            "observations": observation_config(sizes.floats[0]),
            "networks": network_config(sizes.parameters[0]),
            "points": {name: found for family in found for name, found in family.limits().items()},
        },
        curves=[curve for family in found for curve in family.curves()],
        remarks=[
            "Workers: arithmetic is the least of workers × steps of a fragment ÷ the time that acting it takes, and "
            "what the processor times of a flood (workers that need no time to act) leave room for.",
            "Observations, networks: arithmetic takes each role's processor time as a constant and so much per float "
            "or parameter, from the smallest size and a middle one; the others test it. Of these roles the slowest, or "
            "the cores that they share, set the limit.",
            "All is on loopback: no network. The store is a folder and takes a checkpoint where the log is half full.",
        ],
    )  # fmt: skip


def by_workers(options: Options, sizes: Sizes) -> Family:
    """Simulated, and a flood of them for the costs of each step."""
    flood = _measured(options, "a flood of workers", crowd_config(4), _crowds(4, 0.0), sizes.seconds)
    points = [
        Point(count, _measured(options, f"{count} workers", crowd_config(count), _crowds(count, _THINK_SECONDS),
                               sizes.seconds))
        for count in sizes.workers
    ]  # fmt: skip
    bound = slowest(Point(0, flood).cost, _CORES)
    steps = 64 * 8 / _THINK_SECONDS

    def predicted(count: float) -> tuple[float, str]:
        return min((count * steps, "the time that workers act"), bound)

    return Family("workers", "workers", points, predicted)


def by_observations(options: Options, sizes: Sizes) -> Family:
    """One real worker."""
    return _straight(options, "observations", "floats", sizes.floats, observation_config, sizes.seconds)


def by_networks(options: Options, sizes: Sizes) -> Family:
    """One real worker, and a new version for each 32 steps."""
    beyond = sizes.parameters_beyond
    return _straight(options, "networks", "parameters", sizes.parameters, network_config, sizes.seconds, beyond)


def _straight(
    options: Options,
    name: str,
    unit: str,
    sizes: Sequence[int],
    config: Callable[[int], dict[str, Any]],
    seconds: float,
    beyond: Sequence[int] = (),
) -> Family:
    points: list[Point] = []
    for size in sizes:
        try:
            run = _measured(options, f"{size:,} {unit}", config(size), {"worker-0": work}, seconds)
        except RuntimeError as error:
            if len(points) < 2:
                raise
            options.tell(f"{size:,} {unit} and more are worked out only: {error}")
            beyond = [*(larger for larger in sizes if larger >= size), *beyond]
            break
        points.append(Point(size, run))
    return Family(name, unit, points, straight(points, _CORES), beyond)


def _crowds(workers: int, think_seconds: float) -> dict[str, Part]:
    crowds = min(workers, _CROWDS)
    return {
        f"worker-{index}": partial(
            simulate, first=index, stride=crowds, workers=len(range(index, workers, crowds)), think=think_seconds
        )
        for index in range(crowds)
    }


def _measured(
    options: Options, what: str, config: dict[str, Any], workers: Mapping[str, Part], seconds: float
) -> Measured:
    with running(parse_config(config), {"trainer": train, **workers}, _ONE_UPDATE_SECONDS) as roles:
        found = roles.measure(seconds, _ONE_UPDATE_SECONDS)
    options.tell(f"{what}: {found.rate:,.0f} env steps/s, {found.updates} versions in {found.seconds:.1f} s")
    return found
