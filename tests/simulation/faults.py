"""Faults of a simulated run, and orders to it: drawn by its seed, one after another, until the run is left in peace."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from stagecoach.coordinator.lifecycle.run_lease import RunLease
from stagecoach.shared.experience.spaces import Columns
from stagecoach.shared.policies.serialization import decode_policy, state_arrays
from stagecoach.shared.runtime.run_context import RunContext
from stagecoach.shared.storage.checkpoint_store import Checkpoint
from stagecoach.trainer_node.checkpointing.verification import promote
from stagecoach.trainer_node.state.fork import Source, forked
from stagecoach.trainer_node.state.snapshot import POLICY
from tests.simulation.network import Delays
from tests.simulation.redis_model import Keys
from tests.simulation.run import Setting, SimulatedRun
from tests.simulation.scheduler import Process

_LOADING = "LOADING Redis is loading the dataset in memory"
_BUSY = "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE."
_DELAYS = (
    "redis back", "redis back", "pause", "too late", "too late", "cut", "slow", "late", "late start", "redis forgets",
)  # fmt: skip
"""One of these is in each walk."""
_BREAKS = 0.004
"""Probability that an answer is lost, until the faults stop."""
_READ_ONLY = "READONLY You can't write against a read only replica."


@dataclass(frozen=True)
class Fault:
    """One fault: its time, its kind, and the seed of its details."""

    at: float
    kind: str
    seed: int


def planned(draw: random.Random, setting: Setting, seconds: float, mean_seconds: float) -> tuple[Fault, ...]:
    """Some faults of a few kinds: a few at a time find more than all together."""
    missing = {"shard"} if not setting.shards else set[str]()
    missing |= {"memory"} if not setting.shared_memory else set[str]()
    kinds = [kind for kind in Faults.KINDS if kind.partition(" ")[0] not in missing]
    kinds = [draw.choice(("kill", "kill often")), draw.choice(_DELAYS), *draw.sample(kinds, draw.randint(1, 6))]
    found, now = list[Fault](), draw.expovariate(1 / mean_seconds)
    while now < seconds:
        found.append(Fault(round(now, 3), draw.choice(kinds), draw.getrandbits(32)))
        now += draw.expovariate(1 / mean_seconds)
    return tuple(found)


class Faults:
    """Carries out what is planned; `told` is what has been done so far."""

    KINDS: ClassVar[dict[str, str]] = {
        "kill": "_kill", "kill often": "_kill_often", "pause": "_pause", "too late": "_too_late", "clock": "_jump",
        "scale": "_scale",
        "terminate": "_terminate", "actor": "_kill_actor", "coordinator": "_kill_coordinator",
        "second trainer": "_second_trainer", "second worker": "_second_worker",
        "second coordinator": "_second_coordinator", "fork": "_fork",
        "stop": "_stop", "prune": "_prune", "promote": "_promote", "order": "_order",
        "redis away": "_redis_away", "redis refuses": "_redis_refuses", "redis back": "_redis_back",
        "redis forgets": "_redis_forgets",
        "redis full": "_redis_full", "cut": "_cut", "slow": "_slow_network", "late": "_late",
        "late start": "_late_start", "garble": "_garble", "garbage": "_garbage",
        "shard away": "_shard_away", "shard empty": "_shard_empty",
        "memory full": "_memory_full", "memory empty": "_memory_empty",
        "store away": "_store_away", "store fails": "_store_fails", "store full": "_store_full",
        "no deletion": "_no_deletion",
    }  # fmt: skip
    """Kind → the method that does it, and says what it did."""

    def __init__(self, run: SimulatedRun, plan: Sequence[Fault]) -> None:
        self.run, self._draw = run, random.Random(0)
        self.told: list[str] = []
        self._ends: dict[int, Callable[[], None]] = {}
        """Calls that end the present outages, by number."""
        self._others: list[Process] = []
        """Trainers and workers that are not the fleet's."""
        run.server.breaks = _BREAKS
        for fault in plan:
            run.scheduler.after(fault.at, partial(self._happens, fault))

    def _happens(self, fault: Fault) -> None:
        if self.run.over:
            return
        self._draw = random.Random(fault.seed)
        self.told.append(f"{fault.at:9.3f} s  {getattr(self, self.KINDS[fault.kind])()}")

    def stop(self) -> None:
        """Leaves the run in peace, with everything mended and all workers wanted."""
        for number in list(self._ends):
            self._end(number)
        for server in (self.run.server, *self.run.shards.values()):
            server.delays.often = server.breaks = 0.0
        for process in (*self.run.processes.values(), *self._others):
            process.paused_until = process.breaks = 0.0
        for process in self._others:
            process.kill()

        def wanted(context: RunContext) -> None:
            context.flow.set_desired_workers(self.run.setting.workers)

        for seconds in (0.0, 4.0, 9.0):  # an earlier order may still be on its way
            self.run.scheduler.after(seconds, lambda: self.run.from_outside(wanted))

    def _set_for_a_while(self, thing: object, name: str, value: object, usual: object, longest: float) -> float:
        """Sets an attribute that is `usual` again afterwards; returns for how many seconds."""
        setattr(thing, name, value)
        return self._for_a_while(longest, partial(setattr, thing, name, usual))

    def _for_a_while(self, longest: float, end: Callable[[], None]) -> float:
        seconds, number = self._draw.uniform(0.1, longest), len(self.told)
        self._ends[number] = end
        self.run.scheduler.after(seconds, partial(self._end, number))
        return seconds

    def _end(self, number: int) -> None:
        if (end := self._ends.pop(number, None)) is not None:
            end()

    def _role(self) -> str:
        return self._draw.choice(sorted({*self.run.processes} - {"coordinator"}))

    # Processes

    def _kill(self) -> str:
        role = self._role()
        self.run.processes[role].kill()
        return f"{role} is killed"

    def _kill_often(self) -> str:
        role, times = self._role(), self._draw.randint(2, 5)
        for number in range(times):
            self.run.scheduler.after(self._draw.uniform(0.0, 3.0) * number, lambda: self.run.processes[role].kill())
        return f"{role} is killed {times} times"

    def _terminate(self) -> str:
        process, seconds = self.run.processes[self._role()], self._draw.uniform(0.1, 30.0)
        process.signal()
        self.run.scheduler.after(seconds, process.kill)
        return f"{process.name} gets SIGTERM, and SIGKILL after {seconds:.1f} s"

    def _kill_actor(self) -> str:
        actors = [actor for actor in self.run.ray.actors if actor.alive]
        if not actors:
            return "there is no actor"
        actor = self._draw.choice(actors)
        actor.kill()
        return f"the actor of {actor.name} is killed"

    def _kill_coordinator(self) -> str:
        self.run.processes["coordinator"].kill()
        return "the coordinator is killed"

    def _pause(self) -> str:
        role, seconds = self._draw.choice(sorted(self.run.processes)), self._draw.choice((0.3, 2.0, 10.5, 12.0, 30.0))
        self.run.processes[role].paused_until = self.run.scheduler.now + seconds
        return f"{role} stands still for {seconds} s"

    def _too_late(self) -> str:
        """A worker comes back when its lease has run out, and hears little of what it is answered."""
        workers = [role for role in sorted(self.run.processes) if "worker" in role]
        if not workers:
            return "there is no worker"
        process, seconds = self.run.processes[self._draw.choice(workers)], self._draw.choice((10.5, 12.0, 20.0))
        process.paused_until, process.breaks = self.run.scheduler.now + seconds, 0.6
        self.run.scheduler.after(seconds + self._draw.uniform(0.5, 4.0), partial(setattr, process, "breaks", 0.0))
        return f"{process.name} stands still for {seconds} s, and then its connections break"

    def _jump(self) -> str:
        role, seconds = self._draw.choice([*sorted(self.run.processes), "redis"]), self._draw.choice((86400, -3600, -2))
        if role == "redis":
            self.run.clock_offset += seconds
        else:
            self.run.processes[role].clock_offset += seconds
        return f"the clock of {role} jumps by {seconds} s"

    def _second_trainer(self) -> str:
        return self._second("trainer")

    def _second_worker(self) -> str:
        workers = [role for role in sorted(self.run.processes) if "worker" in role]
        return self._second(self._draw.choice(workers)) if workers else "there is no worker"

    def _second(self, role: str) -> str:
        """Somebody starts one while the fleet's is at work, and may be slow."""
        ours = self.run.processes[role]
        other = self.run.start(role)
        self._others.append(other)
        self.run.processes[role] = ours
        self.run.scheduler.after(self._draw.uniform(1.0, 60.0), other.kill)
        if self._draw.random() < 0.5:
            ours.paused_until = self.run.scheduler.now + self._draw.uniform(0.0, 10.0)
        return f"another {role} is started while the first is running"

    def _second_coordinator(self) -> str:
        """Somebody resumes the run on another machine; if its coordinator is silent, that machine is gone."""

        def resume(context: RunContext) -> None:
            lease = RunLease(context)
            lease.take()
            self.run.processes["coordinator"].kill()
            lease.release()

        self.run.from_outside(resume)
        return "somebody resumes the run on another machine"

    def _fork(self) -> str:
        """Another run begins with what this one has learned."""

        def fork(context: RunContext) -> None:
            source, name = context.checkpoints.newest_good()[0], next(iter(context.config.policies))
            begun = forked(context, {name: Source(source, name)})
            theirs, own = (weights_of(its, name) for its in (source, begun))
            if any((theirs[key] != own[key]).any() for key in {*theirs, *own}):
                self.run.failed = AssertionError(f"a fork of {source.manifest.name} begins with other weights")

        self.run.from_outside(fork)
        return "another run begins with the newest checkpoint"

    def _scale(self) -> str:
        workers = self._draw.randint(1, self.run.setting.workers)
        self.run.from_outside(lambda context: context.flow.set_desired_workers(workers))
        return f"{workers} of {self.run.setting.workers} workers are wanted"

    def _stop(self) -> str:
        if self.run.stop_ordered:
            return "the run is stopped already"
        self.run.stop()
        return "the run is stopped, and then resumed"

    def _prune(self) -> str:
        self.run.prunes = True
        return f"{self._stop()}; all checkpoints but the last are pruned then"

    def _order(self) -> str:
        self.run.from_outside(lambda context: context.flow.order_checkpoint())
        return "a checkpoint is ordered"

    def _promote(self) -> str:
        names = sorted({key.split("/")[1] for key in self.run.bucket.objects if key.startswith("checkpoints/")})
        if not names:
            return "there is nothing to promote"
        name = self._draw.choice(names)

        self.run.from_outside(lambda context: promote(context.checkpoints, name, live=True))
        return f"{name} is promoted"

    # Redis

    def _garble(self) -> str:
        seconds = self._set_for_a_while(self.run.server, "garbles", 0.02, 0.0, 5.0)
        return f"some answers of Redis are garbled for {seconds:.1f} s"

    def _shard_away(self) -> str:
        name = self._draw.choice(sorted(self.run.shards))
        shard = self.run.shards[name]
        shard.stop()
        return f"{name} is away for {self._for_a_while(10.0, partial(setattr, shard, 'up', True)):.1f} s"

    def _shard_empty(self) -> str:
        name = self._draw.choice(sorted(self.run.shards))
        self.run.bodies_lost = True
        self.run.shards[name].stop()
        self.run.shards[name].model.restart(Keys(), "another")
        self.run.shards[name].up = True
        return f"{name} has lost all that it had"

    def _redis_away(self) -> str:
        self.run.server.stop()

        def back() -> None:
            self.run.restart_redis(self.run.model.keys.copy())

        return f"Redis is away for {self._for_a_while(20.0, back):.1f} s"

    def _redis_back(self) -> str:
        """It restarts from its file, or a replica takes its place: what came last is lost."""
        images = [image for image in self.run.images if any(b":flow" in key for key in image[1])]
        if not images:
            return "Redis has no file with the run yet"
        when, keys = self._draw.choice(images)
        lost = self.run.scheduler.now - when
        self.run.server.stop()
        keys = keys.copy()

        def back() -> None:
            self.run.restart_redis(keys)

        return f"Redis loses the last {lost:.2f} s, and is away for {self._for_a_while(3.0, back):.1f} s"

    def _redis_forgets(self) -> str:
        """It comes back without knowing of the present trainer, nor of what workers did for it."""
        keys, then = self.run.model.keys.copy(), self._draw.uniform(0.0, 3.0)
        before = self.run.epoch
        self.run.processes["trainer"].kill()

        def lose() -> None:
            self.run.server.stop()
            self.run.scheduler.after(0.5, partial(self.run.restart_redis, keys))

        def look(left: int) -> None:
            if self.run.epoch > before:
                self.run.scheduler.after(then, lose)
            elif left:
                self.run.scheduler.after(0.5, partial(look, left - 1))

        look(40)
        return f"the trainer is killed, and {then:.1f} s after the next one takes over Redis forgets all since"

    def _redis_refuses(self) -> str:
        text = self._draw.choice((_LOADING, _BUSY, _READ_ONLY))
        seconds = self._set_for_a_while(self.run.server, "refuses", text, "", 8.0)
        return f"Redis answers {text.split()[0]} for {seconds:.1f} s"

    def _redis_full(self) -> str:
        seconds = self._set_for_a_while(self.run.model, "memory_full", True, False, 15.0)
        return f"Redis has no memory for {seconds:.1f} s"

    def _cut(self) -> str:
        count = 0
        for wire in list(self.run.server.wires):
            if self._draw.random() < 0.5:
                wire.break_off()
                count += 1
        return f"{count} connections are cut"

    def _slow_network(self) -> str:
        delays = self.run.server.delays
        delays.often, delays.longest = self._draw.choice(((0.5, 0.5), (0.1, 8.0)))

        def end() -> None:
            delays.often, delays.longest = Delays.often, Delays.longest

        return f"the network is slow for {self._for_a_while(20.0, end):.1f} s"

    def _late(self) -> str:
        """Delays what a process sends; its connections end before that arrives, so it comes after later commands."""
        role = self._role()
        return f"what {role} sends {self._send_late(self.run.processes[role])}"

    def _late_start(self) -> str:
        role = self._role()
        self.run.when_started[role] = self._send_late
        self.run.processes[role].kill()
        return f"{role} is killed, and what its successor sends first comes late"

    def _send_late(self, process: Process) -> str:
        process.late, killed = self._draw.choice((0.5, 3.0, 12.0)), self._draw.random() < 0.5
        seconds = self._draw.choice((0.05, 0.5, 2.0))

        def end() -> None:
            process.late = 0.0
            for server in (self.run.server, *self.run.shards.values()):
                for wire in [wire for wire in server.wires if wire.process is process]:
                    wire.break_off()
            if killed:
                process.kill()

        self.run.scheduler.after(seconds, end)
        then = "and it is killed" if killed else "and its connections are cut"
        return f"in {seconds} s comes {process.late} s late, {then}"

    def _garbage(self) -> str:
        place = self._draw.choice(("log", "events"))
        key = f"stagecoach:{{{self.run.run_id}}}:{place}".encode()
        entry = [b"worker", b"worker-0", b"seq", b"0", b"fragment", b"garbage"]
        self.run.server.execute([b"XADD", key, b"*", *entry])
        return f"garbage is put into the {place}"

    def _memory_full(self) -> str:
        seconds = self._set_for_a_while(self.run.memory, "full", True, False, 10.0)
        return f"the shared memory is full for {seconds:.1f} s"

    def _memory_empty(self) -> str:
        self.run.memory.files.clear()
        self.run.bodies_lost = True
        return "the shared memory has lost all that it had"

    # The store

    def _store_away(self) -> str:
        seconds = self._set_for_a_while(self.run.bucket, "up", False, True, 30.0)
        return f"the store is away for {seconds:.1f} s"

    def _store_fails(self) -> str:
        seconds = self._set_for_a_while(self.run.bucket, "fails", self._draw.choice((0.05, 0.3)), 0.0, 30.0)
        return f"the store fails for {seconds:.1f} s"

    def _store_full(self) -> str:
        seconds = self._set_for_a_while(self.run.bucket, "full", True, False, 20.0)
        return f"the store is full for {seconds:.1f} s"

    def _no_deletion(self) -> str:
        seconds = self._set_for_a_while(self.run.bucket, "deletes", False, True, 60.0)
        return f"the store deletes nothing for {seconds:.1f} s"


def weights_of(checkpoint: Checkpoint, policy_id: str) -> Columns:
    return state_arrays(decode_policy(checkpoint.objects[POLICY.format(policy_id)])[0])
