"""What each step of the protocol costs with many workers: `python -m benchmarks.rehearsal.costs --workers 200 10000`.

One process plays all of them in turn against a real Redis: each has registered, beaten, and has a fragment in flight.
So what grows with the number of workers shows, without ten thousand processes. Redis is charged by its own processor
time (INFO cpu: parsing, sending and the append-only file are in it), this process by its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import redis

from benchmarks.kit.own_run import own_services
from benchmarks.rehearsal.crowd import record
from stagecoach.coordinator.catalog.status import live_status
from stagecoach.rollout_worker.sampling import action_trace
from stagecoach.shared.config.loading import parse_config
from stagecoach.shared.experience import fragment
from stagecoach.shared.experience.counters import Phase, PhaseCounters
from stagecoach.shared.policies.registry import build_policies
from stagecoach.shared.policies.serialization import VersionHeader, encode_board, state_arrays
from stagecoach.shared.protocol.experience_log import ExperienceLog
from stagecoach.shared.protocol.flow_control import Claim, ClaimReply
from stagecoach.shared.protocol.heartbeat import Heartbeat, read_heartbeats
from stagecoach.shared.protocol.keys import RunKeys
from stagecoach.shared.protocol.ledger import read_accounting
from stagecoach.shared.protocol.policy_board import PolicyBoard
from stagecoach.shared.runtime.run_context import RunContext, open_run_context
from stagecoach.trainer_node.state.log_consumer import LogConsumer, RedisAccounting

_SOME = 200
"""How often a step is done that need not be done for each worker."""
_FEW = 5
"""Of those that take long."""


@dataclass(frozen=True)
class Cost:
    """One step, per call, in microseconds."""

    step: str
    redis: float
    caller: float


class Costs:
    """The steps of a run with so many workers, in an order in which each finds what it needs."""

    def __init__(self, role: RunContext, workers: int) -> None:
        self._role, self._workers = role, workers
        self._names = [f"worker-{index}" for index in range(workers)]
        self._log, self._board = ExperienceLog(role.redis, role.run_id), PolicyBoard(role.redis, role.run_id)
        description = role.description()
        self._take = record(role)[0]
        policies = build_policies(description.policies, role.config.policies, role.config.algorithm, seed=0)
        states = {policy_id: state_arrays(policy) for policy_id, policy in policies.items()}
        self._header = VersionHeader(0, Phase.TRAIN, PhaseCounters())
        self._blob = encode_board(states, self._header)
        self._epoch = role.flow.take_over()
        accounting = RedisAccounting(role.redis, role.run_id, self._epoch)
        self._consumer = LogConsumer(role.run_id, role.config, description, self._log.read, accounting)
        self.costs: list[Cost] = []
        self.sizes: dict[str, int] = {"policy version": len(self._blob)}

    def measure(self) -> None:
        """All steps, in order."""
        role, run, flow = self._role, self._role.run_id, self._role.flow
        self._publish(0, 0)
        self._each("register, no claim is held", self._workers, lambda index: flow.register(self._names[index]))
        empty = self._memory()
        self._each("claim, granted", self._workers, lambda index: flow.claim(self._names[index], 0, 0))
        self._each("register, each holds a claim", _SOME, lambda index: flow.register(f"other-{index}"))
        self._each("release, each holds a claim", _SOME, lambda index: flow.release(f"other-{index}"))
        refused = flow.claim("other-0", 0, 0)
        assert refused.reply == "wait_credit"
        self._each("claim, refused", _SOME, lambda index: flow.claim(f"other-{index}", 0, 0))
        self._each("wait that ends at once", _SOME, lambda index: self._woken())
        encoded = [self._encode(name) for name in self._names[: min(_SOME, self._workers)]]
        self.sizes["fragment"] = len(encoded[0])
        self._each("encode a fragment", _SOME, lambda index: self._encode(self._names[0]))
        self._each("push", self._workers, self._push)
        self.sizes["fragment in Redis"] = (self._memory() - empty) // self._workers
        self._each("fetch the policy", _SOME, lambda index: self._board.fetch(role.checkpoints))
        beats = [Heartbeat(role.redis, run, "worker", name) for name in self._names]
        for beat in beats:
            beat.progress = {"incarnation": 0, "fragments": 1000, "transitions": 512000, "version": 100}  # fmt: skip
        self._each("heartbeat", self._workers, lambda index: beats[index]._beat())
        self._each("read all heartbeats", _FEW, lambda index: read_heartbeats(role.redis, run))
        self._each("accounting, all in flight", _FEW, lambda index: read_accounting(role.redis, run))
        self._each("status, all in flight", _FEW, lambda index: live_status(role.redis, run))
        self._each("consuming a fragment", self._workers, lambda index: self._consumer.take(0, Phase.TRAIN, 0.0))
        self._each("ledger as JSON", _FEW, lambda index: self._consumer.ledger.as_json())
        self.sizes["ledger"] = len(self._consumer.ledger.as_json())
        self._each("publish", 1, lambda index: self._publish(1, self._workers))
        self._each("publish again", _FEW, lambda index: self._publish(index + 2, 0))
        self._each("publish, one worker's account changed", _FEW, self._publish_one)
        self._each("accounting, none in flight", _FEW, lambda index: read_accounting(role.redis, run))
        self._each("trim", 1, lambda index: self._log.trim(self._epoch, self._consumer.committed.position))
        accounting = {worker: line.as_dict() for worker, line in read_accounting(role.redis, run).items()}
        self.sizes["accounting in a checkpoint"] = len(json.dumps(accounting))
        beating = cast(list[bytes], role.redis.hvals(RunKeys(run).heartbeats("worker")))
        self.sizes["heartbeats"] = sum(len(value) for value in beating)
        self.sizes["Redis without fragments, per worker"] = self._memory() // self._workers

    def _each(self, step: str, times: int, call: Callable[[int], Any]) -> None:
        before, ours = _redis_seconds(self._role.redis), time.process_time()
        for index in range(times):
            call(index)
        ours = time.process_time() - ours
        used = _redis_seconds(self._role.redis) - before
        self.costs.append(Cost(step, 1e6 * used / times, 1e6 * ours / times))

    def _push(self, index: int) -> None:
        name = self._names[index]
        step = action_trace.encode(self._take.step)
        blob = self._encode(name)
        assert self._log.push(name, 0, 0, self._epoch, self._transitions, blob, step, 8) == "pushed"

    def _encode(self, worker: str) -> bytes:
        rollout, environment = self._role.config.rollout, self._role.config.environment
        header = fragment.FragmentHeader(
            run_id=self._role.run_id, worker_id=worker, incarnation=0, seq=0, phase=Phase.TRAIN,
            policy_versions=dict.fromkeys(self._take.sample.columns, 0), steps=rollout.fragment_steps,
            num_envs=environment.num_envs, episodes=self._take.sample.episodes,
        )  # fmt: skip
        return fragment.encode(fragment.Fragment(header, self._take.sample.columns))

    @property
    def _transitions(self) -> int:
        return self._role.config.rollout.fragment_steps * self._role.config.environment.num_envs

    def _woken(self) -> None:
        self._role.flow.wait_for_wakeup(Claim(ClaimReply.WAIT_CREDIT, 0, 0, "0-0"), 1.0)

    def _publish_one(self, index: int) -> None:
        self._consumer.ledger.of(self._names[0])
        self._publish(index + _FEW + 2, 0)

    def _publish(self, version: int, consumed: int) -> None:
        self._consumer.commit()
        self._board.publish(
            epoch=self._epoch, version=version, consumed=consumed, committed_id=self._consumer.position,
            ledger=self._consumer.ledger, header=self._header, blob=self._blob,
        )  # fmt: skip

    def _memory(self) -> int:
        """Without what waits for the disk."""
        found = self._role.redis.info()
        return int(found["used_memory"]) - int(found.get("aof_buffer_length", 0))


def _redis_seconds(client: redis.Redis) -> float:
    used = dict(client.info("cpu"))
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


def measure(workers: int, steps: int, envs: int) -> Costs:
    """On a Redis of its own."""
    config = parse_config({
        "environment": {"id": "CartPole-v1", "num_envs": envs},
        "rollout": {"workers": workers, "fragment_steps": steps, "fragments_per_update": workers,
                    "max_log_bytes": 1 << 40, "lease_seconds": 3600},
        "algorithm": {"minibatch_size": 1},
        "stop_at": {"updates": 10**9},
    })  # fmt: skip
    with own_services() as services:
        role = open_run_context(config, services.new_run(config).address)
        made = Costs(role, workers)
        made.measure()
        role.redis.close()
        return made


def main() -> int:
    """Prints a table: step; processor time of Redis and of the caller for each call, per number of workers."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rehearsal.costs")
    parser.add_argument("--workers", type=int, nargs="+", default=[200, 1000, 10_000])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--envs", type=int, default=8)
    given = parser.parse_args()
    found = [measure(workers, given.steps, given.envs) for workers in given.workers]
    print("| µs of Redis / of the caller | " + " | ".join(f"{workers} workers" for workers in given.workers) + " |")
    print("|---|" + "---|" * len(found))
    for lines in zip(*(costs.costs for costs in found), strict=True):
        print(f"| {lines[0].step} | " + " | ".join(f"{line.redis:,.0f} / {line.caller:,.0f}" for line in lines) + " |")
    print("\n| bytes | " + " | ".join(f"{workers} workers" for workers in given.workers) + " |")
    print("|---|" + "---|" * len(found))
    for name in found[0].sizes:
        print(f"| {name} | " + " | ".join(f"{costs.sizes[name]:,}" for costs in found) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
