"""How much of Redis is left: bytes a second from workers to trainer, against raw pipelined Redis and against others.

Each line is a number of messages, from the producers' first to the consumer's last, producers and consumer in
processes of their own. The product's lines do for each fragment what rollout worker and trainer do: claim, push, read,
and publish and trim once for so many. `bytes` are encoded once for all, as in the raw lines; `arrays` are encoded,
decoded and checked each time. Others carry the arrays of the same fragments, one producer and one consumer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks.kit.measure import Measure, Result
from benchmarks.kit.options import Options, in_turns
from benchmarks.kit.own_run import Services, own_services
from benchmarks.kit.station import Station
from benchmarks.transport import raw_redis
from benchmarks.transport.made_fragments import Shape, made_columns
from benchmarks.transport.others import running
from benchmarks.transport.product_path import TRIM_EACH, PushingWorker, TakingTrainer
from stagecoach.shared.experience.spaces import Columns

_WORKERS = (1, 2)
_AIM = 0.8
_USUAL = "64 × 64"


@dataclass(frozen=True)
class Size:
    """One size of message, and how many of them a sample sends."""

    name: str
    shape: Shape
    count: int
    fragments_per_update: int
    max_policy_lag: int


_SIZES = (
    Size("4 KB", Shape(8, 10), 5000, 16, 99),
    Size("64 KB", Shape(64, 28), 2000, 8, 99),
    Size(_USUAL, Shape(64, 64), 1000, 8, 99),
    Size("1 MB", Shape(64, 466), 200, 4, 31),
    Size("4 MB", Shape(64, 1868), 50, 2, 15),
)
"""Of CartPole; beside those, 64 steps of 64 copies. A connection's first sends may wait a quarter of a second for the
kernel; the lag is so large that a worker then still finds its fragments taken."""
_QUICK = tuple(Size(size.name, size.shape, 8, 2, 1) for size in (_SIZES[0], _SIZES[2]))


class Hall:
    """The services and the processes that everything is measured with."""

    def __init__(self, services: Services, producers: list[Station], workers: list[Station]) -> None:
        self.services, self._producers, self._workers = services, producers, workers
        self._raw = Station(raw_redis.RawConsumer, services.redis_url, services.redis_password)
        self._trainer = Station(TakingTrainer)
        self.bytes: dict[str, int] = {}
        """Of one message of a size, as it is encoded."""

    def learn_sizes(self, sizes: tuple[Size, ...]) -> None:
        """What a fragment of each size takes."""
        for size in sizes:
            self.bytes[size.name] = int(self._workers[0].call("join", self._new_run(size), size.shape))
            self._workers[0].call("leave")

    def raw(self, how: str, size: Size, producers: int) -> float:
        """Bytes a second of Redis without anything around it."""
        of_one, share = self.bytes[size.name], size.count // producers
        trim_each = size.fragments_per_update * TRIM_EACH
        self._raw.begin("consume", of_one, share * producers, raw_redis.batch(of_one), trim_each)
        for station in self._producers[:producers]:
            station.begin(how, of_one, share)
        began: float = min(station.answer() for station in self._producers[:producers])
        seconds = float(self._raw.answer()) - began
        self._clean()
        return share * producers * of_one / seconds

    def product(self, size: Size, workers: int, arrays: bool, shared_memory: bool = True) -> float:
        """Bytes a second of our own path; large bodies through shared memory, as `stagecoach train` does, or not."""
        launch, share = self._new_run(size, shared_memory), size.count // workers
        self._trainer.call("join", launch)
        for station in self._workers[:workers]:
            station.call("join", launch, size.shape)
        self._trainer.begin("take", share * workers, arrays)
        for station in self._workers[:workers]:
            station.begin("push", share, arrays)
        began: float = min(station.answer() for station in self._workers[:workers])
        seconds = float(self._trainer.answer()) - began
        for station in (self._trainer, *self._workers[:workers]):
            station.call("leave")
        self._clean()
        return share * workers * self.bytes[size.name] / seconds

    def fragments_per_second(self, size: Size) -> float:
        """One worker's arrays, as others carry them: to and fro, encoding and checks included."""
        return self.product(size, 1, True) / self.bytes[size.name]

    def columns(self, size: Size) -> Columns:
        """The arrays of the fragments that the first worker pushes."""
        launch = self._new_run(size)
        return made_columns(launch.open("worker-0").description(), size.shape, 0)

    def close(self) -> None:
        """Ends the processes."""
        for station in (self._raw, self._trainer, *self._producers, *self._workers):
            station.close()

    def _new_run(self, size: Size, shared_memory: bool = False) -> Any:
        return self.services.new_run(run_sections(size), shared_memory=shared_memory)

    def _clean(self) -> None:
        """The next sample finds Redis as this one did: empty, and with a short append-only file."""
        with self.services.client() as client:
            client.flushall()
            client.bgrewriteaof()
            while client.info("persistence")["aof_rewrite_in_progress"]:
                time.sleep(0.02)


def run_sections(size: Size) -> dict[str, Any]:
    """The config of a run with fragments of this size."""
    return {
        "environment": {"id": "CartPole-v1", "num_envs": size.shape.envs},
        "rollout": {
            "fragment_steps": size.shape.steps, "fragments_per_update": size.fragments_per_update,
            "max_policy_lag": size.max_policy_lag, "max_log_bytes": 4 << 30,
        },
        "algorithm": {"name": "appo", "minibatch_size": size.shape.steps},
        "stop_at": {"updates": 10**9},
    }  # fmt: skip


@contextmanager
def hall() -> Iterator[Hall]:
    """All of it, for as long as the block lasts."""
    with own_services() as services:
        with services.client() as client:  # else it is begun in the midst of whatever is measured then
            client.config_set("auto-aof-rewrite-percentage", 0)
        arguments = services.redis_url, services.redis_password
        producers = [Station(raw_redis.RawProducer, *arguments) for _ in _WORKERS]
        made = Hall(services, producers, [Station(PushingWorker, index) for index, _ in enumerate(_WORKERS)])
        try:
            yield made
        finally:
            made.close()


def measure(options: Options) -> Result:
    """Our own path against raw Redis at each size, what lies between them at one, and others on the same arrays."""
    sizes = _QUICK if options.quick else _SIZES
    usual = next(size for size in sizes if size.name == _USUAL)
    with hall() as made:
        made.learn_sizes(sizes)
        calls, against = _lines(made, sizes)
        samples = in_turns(options, {what: call for what, call in calls.items() if options.wants(what)})
        beside, remarks = _beside_others(options, made, usual)
    measures = [
        Measure(what, "bytes/s", found, *_comparison(what, against, samples)) for what, found in samples.items()
    ]
    settings = {
        "sizes": [asdict(size) | {"bytes": made.bytes[size.name]} for size in sizes],
        "trim": f"each {TRIM_EACH} updates; raw: after as many messages",
        "raw pipeline": {size.name: raw_redis.batch(made.bytes[size.name]) for size in sizes},
        "redis": "appendonly yes, appendfsync everysec, on a socket, as `stagecoach train` starts it; its file is "
        "rewritten between samples, never during one",
        "action_trace": "none (what a successor needs to take up episodes travels beside a fragment)",
    }
    return Result("transport", __doc__ or "", measures + beside, settings, remarks=remarks)


def _beside_others(options: Options, made: Hall, size: Size) -> tuple[list[Measure], list[str]]:
    """Fragments a second of each other, and of ours beside it; in a quick run only what is asked for by name."""
    if options.quick and not options.only:
        return [], ["others were not measured in this quick run"]
    with running(options, made.columns(size), size.count) as (programs, remarks):
        if not programs:
            return [], remarks
        calls: dict[str, Callable[[], float]] = {"ours": partial(made.fragments_per_second, size)}
        calls |= {name: program.fragments_per_second for name, program in programs.items()}
        samples = in_turns(options, calls)
    measures = []
    for name in programs:
        measures.append(Measure(name, "fragments/s", samples[name]))
        measures.append(Measure(f"ours, compared with {name}", "fragments/s", samples["ours"], name, 1.0))
    return measures, remarks


def _lines(made: Hall, sizes: tuple[Size, ...]) -> tuple[dict[str, Callable[[], float]], dict[str, str]]:
    """Line → how it is measured; line → what it is compared with."""
    calls: dict[str, Callable[[], float]] = {}
    against: dict[str, str] = {}
    for size in sizes:
        for workers in _WORKERS:
            who = f"{size.name}, {workers} worker{'s' if workers > 1 else ''}"
            calls[raw := f"raw pipelined: {who}"] = partial(made.raw, "pipelined", size, workers)
            calls[ours := f"ours, bytes: {who}"] = partial(made.product, size, workers, False)
            against[ours] = raw
            calls[redis := f"ours, bytes, without shared memory: {who}"] = partial(
                made.product, size, workers, False, False
            )
            against[redis] = raw
            if size.name == _USUAL:
                for name, how in (("raw one by one", "one_by_one"), ("raw by script", "by_script")):
                    calls[f"{name}: {who}"] = partial(made.raw, how, size, workers)
                    against[f"{name}: {who}"] = raw
                calls[f"ours, arrays: {who}"] = partial(made.product, size, workers, True)
                against[f"ours, arrays: {who}"] = raw
    return calls, against


def _comparison(what: str, against: dict[str, str], samples: dict[str, list[float]]) -> tuple[str, float | None]:
    """What a line is compared with, where that was measured too, and the aim."""
    other = against.get(what, "")
    if other not in samples:
        return "", None
    return other, _AIM if what.startswith("ours, bytes:") else None
