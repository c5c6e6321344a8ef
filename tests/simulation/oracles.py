"""What must hold in a simulated run after each step, and at its end: counted here anew, from what server and store saw.

`Watched` is the product's trainer, which also shows what each version was learned from.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from stagecoach.shared.base.errors import ArchiveIncomplete, CheckpointError
from stagecoach.shared.experience.checkpoint_name import checkpoint_version
from stagecoach.shared.experience.fragment import Fragment
from stagecoach.shared.experience.log_entry import STRANGERS, BodyPlace, id_order
from stagecoach.shared.protocol.heartbeat import DEAD_AFTER_SECONDS
from stagecoach.shared.protocol.scripts import NAMES, source
from stagecoach.shared.storage.checkpoint_store import FINISHED, Checkpoint, CheckpointStore
from stagecoach.shared.storage.log_archive import Archive
from stagecoach.trainer_node.replay.comparison import replay
from stagecoach.trainer_node.replay.rerun import BEGINNING
from stagecoach.trainer_node.state.snapshot import read_state
from stagecoach.trainer_node.trainer import Trainer
from tests.simulation.run import SimulatedRun
from tests.simulation.scheduler import Task
from tests.simulation.store import Store

PROGRESS_SECONDS = 30.0
RESUME_SECONDS = 30.0
"""For a resume, before that: on another machine it waits until the lease has run out, and it may prune."""
_ANCESTORS = 2000
"""Versions before a new one that must not have learned the same."""
_BOUNDED = "log", "pushes", "bodies", "claims", "lost_bodies", "quarantine", "action_trace", "shared_objects"
_FENCED = "publish", "drop", "trim", "fast_forward"
_REFUSALS = b"fenced", -1, 0


class Violation(AssertionError):
    """A condition of an oracle does not hold."""


Name = tuple[str, int, int]
"""Worker, incarnation, number."""


@dataclass(frozen=True)
class Learned:
    """A version, and the fragments that it was learned from, after its parent's."""

    version: int
    history: str
    parent: Learned | None
    names: tuple[Name, ...]
    acted: frozenset[bytes]
    """Digests of what was acted: a successor repeats what its predecessor has acted, under other names."""


@dataclass
class Oracles:
    run: SimulatedRun
    versions: dict[tuple[int, str], str] = field(default_factory=dict)
    """(version, history) → digest of what was published."""
    learned: dict[tuple[int, str], Learned] = field(default_factory=dict)
    pushed: Counter[str] = field(default_factory=Counter)
    """Worker → fragments that the server has taken into its log."""
    _taken: dict[Name, bytes] = field(default_factory=dict)
    """Fragment → digest of what the log has taken."""
    _refused: set[tuple[Name, bytes]] = field(default_factory=set)
    _at_publish: tuple[tuple[int, str], int, frozenset[Name]] | None = None
    """The newest version, that of the newest checkpoint then, and which fragments were in the log."""
    _forwarded: tuple[int, int] = 0, 0
    """Position to which Redis was fast-forwarded last."""
    _lease: tuple[str, float, tuple[int, float]] = "", 0.0, (0, 0.0)
    """Holder of the lease, time of its renewal, and the number of Redis restarts and the clock's offset then."""
    _board: tuple[int, dict[bytes, bytes]] = field(default_factory=lambda: (-1, {}))
    """Number of Redis restarts, and the policy board after the last script."""
    published: int = -1
    violation: str = ""
    replayed: int = 0
    """Versions that a replay has learned again."""
    progress_at: float = 0.0
    """Time of the newest version, or of the end of a stop, before which none could come."""

    def __post_init__(self) -> None:
        self._names = {source(name).sha: name for name in NAMES}
        self.run.model.executed = self._executed
        self.run.bucket.changed = self._stored
        self.run.trainer_class = watched(self)
        self.run.scheduler.after_step = self.check
        self.run.scheduler.long_wait = self._long_wait

    # The server

    def _executed(self, sha: str, keys: list[bytes], args: list[bytes], reply: Any) -> None:
        name = self._names.get(sha, "")
        if name == "publish" and reply[0] in (b"published", b"known"):
            given = dict(zip(source("publish").args, args, strict=False))
            self._published(given, reply[0] == b"published")
        elif name == "push":
            self._pushed(dict(zip(source("push").args, args, strict=False)), reply)
        elif name == "trim" and isinstance(reply, int) and reply > 0:
            self._trimmed(self.run.model.keys[self._key("flow")][b"trimmed_id"].decode())
        elif name == "fast_forward":
            forward = dict(zip(source(name).args, args, strict=False))
            if (forward["mode"], reply) in ((b"anyway", 1), (b"anyway", 2), (b"if_same", 1)):
                self._forwarded = max(self._forwarded, id_order(forward["position"].decode()))
        elif name == "hold_run":
            self._leased(args[0].decode(), args[1].decode(), reply)
        before = self._board
        self._board = self.run.redis_restarts, dict(self.run.model.keys.get(self._key("board"), {}))
        if name in _FENCED:
            self._check_fence(name, int(args[source(name).args.index("epoch")]), reply, before)
        if name in ("publish", "push", "claim", "drop", "trim", "fast_forward", "release", "register"):
            self._check_flow()

    def _pushed(self, given: dict[str, bytes], reply: bytes) -> None:
        """A number has one fragment, and what was refused stays so."""
        name = given["worker"].decode(), int(given["incarnation"]), int(given["seq"])
        if reply == b"pushed":
            self.pushed[name[0]] += 1
        if given["field"] != b"fragment":  # the place of one: each try may have another
            return
        digest = hashlib.sha256(given["value"]).digest()
        if reply == b"stale":
            self._refused.add((name, digest))
        elif reply == b"pushed":
            if (name, digest) in self._refused:
                self.violate(f"{name} is in the log, after it was refused")
            self._taken[name] = digest
        elif reply == b"duplicate" and self._taken.get(name, digest) != digest:
            self.violate(
                f"{name} was acted, but another fragment has this number: it is neither in the log nor counted"
            )

    def _leased(self, coordinator: str, ended: str, reply: bytes) -> None:
        """A lease that was renewed lately goes to no other coordinator."""
        if reply:
            return
        holder, before, clock = self._lease
        silent = self.run.scheduler.now - before
        known = clock == (self.run.redis_restarts, self.run.clock_offset)
        if coordinator and holder not in ("", coordinator, ended) and known and silent < DEAD_AFTER_SECONDS - 1:
            self.violate(f"{coordinator} takes the run from {holder}, which was there {silent:.1f} s before")
        self._lease = coordinator, self.run.scheduler.now, (self.run.redis_restarts, self.run.clock_offset)

    def _check_fence(self, name: str, epoch: int, reply: Any, before: tuple[int, dict[bytes, bytes]]) -> None:
        """A trainer whose successor has taken over is refused, and leaves the policy board as it is."""
        now = self.run.epoch
        first = reply[0] if isinstance(reply, list) else reply
        if epoch < now and first not in _REFUSALS:
            self.violate(f"{name} of epoch {epoch} is answered {first!r}, and the epoch is {now}")
        elif epoch < now and before[0] == self.run.redis_restarts and before != self._board:
            self.violate(f"{name} of epoch {epoch} was refused, and has changed the policy board; the epoch is {now}")

    def _published(self, given: dict[str, bytes], new: bool) -> None:
        version, history = int(given["version"]), given["history"].decode()
        blob = given["blob"]
        if place := BodyPlace.decode(given["place"]):
            blob = self.run.memory.files.get(f"policy:{place.field}", b"")
        digest = hashlib.sha256(blob).hexdigest()
        if blob and self.versions.setdefault((version, history), digest) != digest:
            self.violate(f"version {version} of history {history} has other weights than before")
        if new:
            self._at_publish = (version, history), self._continued(), self._logged()
            self.published, self.progress_at = max(self.published, version), self.run.scheduler.now

    def _continued(self) -> int:
        """The version of the checkpoint from which the next trainer would continue: what the pointer names, or a newer
        one that is complete."""
        objects, epoch, newest = self.run.bucket.objects, 0, -1
        with suppress(ValueError):  # there is no pointer, or half of one
            pointer = json.loads(objects.get(".checkpoint", b""))
            epoch, newest = pointer["epoch"], int(pointer["latest"].partition("_")[0])
        for key in list(objects):
            version = key.removeprefix("checkpoints/").partition("_")[0]
            if key.endswith("/manifest.json") and version.isdigit() and int(version) > newest:
                with suppress(ValueError):
                    newest = int(version) if json.loads(objects[key])["epoch"] >= epoch else newest
        return newest

    def _logged(self) -> frozenset[Name]:
        return frozenset(
            (push[b"worker"].decode(), int(push[b"incarnation"]), int(push[b"seq"])) for _, push in self._pushes()
        )

    def _pushes(self) -> list[tuple[Any, dict[bytes, bytes]]]:
        """Id and fields of each entry of the log that a worker has pushed."""
        found = self.run.model.keys.get(self._key("pushes"))
        if found is None:
            return []
        pairs = zip(found.ids, found.fields, strict=True)
        return [(id_, dict(zip(fields[::2], fields[1::2], strict=True))) for id_, fields in pairs]

    def _trimmed(self, through: str) -> None:
        """The log is a write-ahead log: a checkpoint in the store covers what leaves it."""
        objects, covered = self.run.bucket.objects, (0, 0)
        for key, data in list(objects.items()):
            if key.startswith("checkpoints/") and key.endswith("/manifest.json"):
                with suppress(ValueError):  # half of it
                    covered = max(covered, id_order(json.loads(data)["log_position"]))
        if id_order(through) > covered:
            self.violate(f"the log is trimmed through {through}, and no checkpoint covers more than {covered}")

    def _check_flow(self) -> None:
        keys = self.run.model.keys
        flow = keys.get(self._key("flow"))
        if flow is None:
            return
        claimed, consumed = int(flow[b"claimed"]), int(flow[b"consumed"])
        window = self.run.setting.window
        if self.run.redis_restarts:  # then the log may hold more than the window, until it is read
            window += len(self._in_log())
        if claimed - consumed > window:
            self.violate(f"{claimed - consumed} fragments are in flight, and the window is {window}")
        holding = len(keys.get(self._key("claims"), ())) + self._unread(flow)
        ahead = (
            self.run.setting.transport == "object_store"
        )  # a version is durable, and trimmed, before it is published
        if claimed - consumed != holding and not (self.run.redis_restarts or self.run.bodies_lost or ahead):
            self.violate(f"{claimed - consumed} fragments are in flight, and {holding} claims and entries hold credit")
        if claimed < consumed:
            self.violate(f"{claimed} fragments were claimed, and {consumed} consumed")

    def _unread(self, flow: dict[bytes, bytes]) -> int:
        """Pushed entries behind the published version that are not dropped: each has credit."""
        decided = self.run.model.keys.get(self._key("quarantine"), {})
        published = id_order(flow.get(b"published_id", b"0-0").decode())
        read = max(published, id_order(flow.get(b"trimmed_id", b"0-0").decode()), self._forwarded)
        after = [id_ for id_, _ in self._pushes() if id_ > read]
        return sum(not decided.get(b"%d-%d" % id_, b"").startswith(b"dropped") for id_ in after)

    def _in_log(self) -> list[dict[bytes, bytes]]:
        """The entries that no published version has learned from or dropped."""
        committed = id_order(self.run.model.keys[self._key("flow")].get(b"committed_id", b"0-0").decode())
        return [push for id_, push in self._pushes() if id_ > committed]

    def check_ledger(self) -> None:
        """Per worker: what was produced was consumed, dropped, or lies in the log; also in transitions."""
        keys, waiting, waiting_transitions = self.run.model.keys, Counter[str](), Counter[str]()
        for entry in self._in_log():
            name, count = entry[b"worker"].decode(), 1 + int(entry[b"lost"])
            waiting[name] += count
            waiting_transitions[name] += count * int(entry[b"transitions"])
        ledger = keys.get(self._key("ledger"), {})
        produced = keys.get(self._key("produced"), {})
        workers = {name.rpartition(b":")[0] for name in produced if name.endswith(b":fragments")}
        for worker in sorted(workers - {STRANGERS.encode()}):
            account = json.loads(ledger.get(worker, b'{"consumed":{"fragments":0,"transitions":0},"dropped":{}}'))
            name, made = worker.decode(), int(produced[worker + b":fragments"])
            stale = int(produced.get(worker + b":fragments:stale", 0))
            consumed = account["consumed"]["fragments"]
            dropped = sum(count["fragments"] for count in account["dropped"].values())
            if made - stale != consumed + dropped + waiting[name]:
                self.violate(
                    f"{name} has produced {made} fragments; {consumed} were consumed, {dropped} dropped, "
                    f"{stale} refused, {waiting[name]} wait"
                )
            whole = int(produced[worker + b":transitions"]) - int(produced.get(worker + b":transitions:stale", 0))
            counts = [account["consumed"], *account["dropped"].values()]
            if whole != sum(count.get("transitions", 0) for count in counts) + waiting_transitions[name]:
                self.violate(f"{name} has produced {whole} transitions; {counts}, {waiting_transitions[name]} wait")
            if not self.run.redis_restarts and made - stale != self.pushed[name]:
                self.violate(f"{name} has produced {made - stale} fragments, and the server took {self.pushed[name]}")

    def _key(self, name: str) -> bytes:
        return f"stagecoach:{{{self.run.run_id}}}:{name}".encode()

    # The trainer

    def learns(self, trainer: Trainer, fragments: Sequence[Fragment]) -> None:
        """A trainer has learned its present version from these."""
        version, lag = trainer.version, self.run.setting.max_policy_lag
        for item in fragments:
            behind = version - 1 - item.header.version
            if not 0 <= behind <= lag:
                self.violate(f"version {version} learned from version {item.header.version}; the lag is {lag}")
        positions = [id_order(item.position) for item in fragments]
        if positions != sorted(set(positions)):
            self.violate(f"version {version} learned out of order: {[item.position for item in fragments]}")
        if len(fragments) != self.run.setting.fragments_per_update:
            self.violate(f"version {version} learned from {len(fragments)} fragments")

    def learned_from(self, trainer: Trainer, fragments: Sequence[Fragment]) -> None:
        """The same, once the consumer has named its history: nothing may be in one history twice."""
        version, consumer = trainer.version, trainer.consumer
        history = consumer.history(version)
        parent = self.learned.get((version - 1, consumer.history(version - 1)))
        names = tuple((item.header.worker_id, item.header.incarnation, item.header.seq) for item in fragments)
        acted = frozenset(map(_acted, fragments))
        node = Learned(version, history, parent, names, acted)
        before = self.learned.setdefault((version, history), node)
        if before.names != names:
            self.violate(f"version {version} of history {history} was learned from {before.names}, and {names}")
        seen = set(names)
        if len(seen) < len(names) or len(acted) < len(names):
            self.violate(f"version {version} learned twice from one of {names}")
        self._check_kept(node)
        acted_by = {item.header.version: item.header.history for item in fragments}
        while parent is not None and parent.version > version - _ANCESTORS:
            if acted_by.get(parent.version, parent.history) != parent.history:
                self.violate(f"version {version} learned what another version {parent.version} acted, which is lost")
            if both := seen & {*parent.names}:
                self.violate(f"version {version} learned again from {both}, as version {parent.version} had")
            if acted & parent.acted and not self.run.redis_restarts:  # an older Redis has an older action trace
                self.violate(
                    f"version {version} learned from {names} what version {parent.version} learned from {parent.names}"
                )
            parent = parent.parent

    def _check_kept(self, node: Learned | None) -> None:
        """When a version is published, all that it was learned from is in a checkpoint or in the log."""
        if node is None or self._at_publish is None or self._at_publish[0] != (node.version, node.history):
            return
        (version, _), durable, logged = self._at_publish
        while node is not None and node.version > durable:
            if lost := {*node.names} - logged:
                self.violate(
                    f"version {version} is published, and {lost}, from which version {node.version} was learned, is "
                    f"neither in the log nor in a checkpoint (the newest is of version {durable})"
                )
            node = node.parent

    # The store

    def _stored(self, key: str) -> None:
        objects = self.run.bucket.objects
        if key != ".checkpoint" and not key.startswith("checkpoints/"):
            return
        if key.endswith("/manifest.json") and key not in objects:
            self._check_retention(key)
        if ".checkpoint" not in objects:
            return
        try:
            pointer = json.loads(objects[".checkpoint"])
        except ValueError:  # half of it, which readers read again
            return
        for mark in ("latest", "best", "final"):
            if name := pointer.get(mark):
                self._check_checkpoint(mark, name, pointer["manifest_sha256"] if mark == "latest" else None)

    def _check_retention(self, deleted: str) -> None:
        """The newest checkpoints stay; a person who prunes leaves one."""
        name = deleted.split("/")[1]
        there = {key.split("/")[1] for key in self.run.bucket.objects if key.endswith("/manifest.json")}
        newer = sum((checkpoint_version(each) or 0) > (checkpoint_version(name) or 0) for each in there)
        if name not in there and newer < (1 if self.run.pruned else self.run.config.checkpoint.keep_last):
            self.violate(f"checkpoint {name} was deleted, and {newer} newer ones are there")

    def _check_checkpoint(self, mark: str, name: str, sha256: str | None) -> None:
        objects, root, wrong = self.run.bucket.objects, f"checkpoints/{name}/", "it has no manifest"
        for key, manifest in list(objects.items()):
            if not (key.startswith(root) and key.endswith("/manifest.json")):
                continue
            if sha256 in (None, hashlib.sha256(manifest).hexdigest()):
                folder = key.removesuffix("manifest.json")
                wrong = self._incomplete(folder, json.loads(manifest)["objects"])
                if not wrong:
                    return
        self.violate(f"the pointer says {mark} is {name}, and {wrong}")

    def _incomplete(self, folder: str, listed: dict[str, Any]) -> str:
        for path, told in listed.items():
            data = self.run.bucket.objects.get(folder + path)
            if data is None:
                return f"its object {path} is not there"
            if hashlib.sha256(data).hexdigest() != told["sha256"]:
                return f"its object {path} has other bytes than its manifest says"
        return ""

    # The whole

    def violate(self, text: str) -> None:
        """Notes what is wrong, which ends the walk after this step; raised here, the product could handle it."""
        self.violation = self.violation or text

    def check(self) -> None:
        """After each step."""
        if self.violation:
            raise Violation(self.violation)
        if self.run.failed is not None:
            raise Violation(f"{self._last()} ended, which no fault explains") from self.run.failed

    def _long_wait(self, task: Task, seconds: float) -> None:
        self.violate(f"{task.process.name} has waited for {seconds:.0f} s, and has not said for what")

    def _last(self) -> str:
        return next((name for name, how in self.run.ended if how is self.run.failed), "a process")

    def check_progress(self) -> None:
        """After some time without faults: new versions are published."""
        allowed = RESUME_SECONDS + PROGRESS_SECONDS + 4 * self.run.setting.version_seconds
        if not self.run.over and self.run.scheduler.now - self.progress_at > allowed:
            why = f" ({self.run.resume_error!r})" if self.run.resume_error else ""
            self.violate(
                f"no version since {self.progress_at:.1f} s (version {self.published}); it is "
                f"{self.run.scheduler.now:.1f} s, and for {allowed:g} s nothing has happened to the run{why}"
            )
        self.check()

    def check_end(self) -> None:
        """A run that was stopped has ended, and its last version is final."""
        run, checkpoints = self.run, CheckpointStore(Store(self.run.bucket), self.run.run_id)
        if not run.over:
            self.violate(f"the run was stopped, and has not ended by {run.scheduler.now:.1f} s")
            return
        finished, pointer = checkpoints.marker(FINISHED) or {}, checkpoints.pointer()
        if (finished.get("reason"), finished.get("version")) != ("stopped", self.published):
            self.violate(f"the run was stopped at version {self.published}, and .finished says {finished}")
        elif pointer is None or pointer.final is None or checkpoint_version(pointer.final) != self.published:
            self.violate(f"the run was stopped at version {self.published}, and the pointer says {pointer}")

    def check_bounded(self) -> None:
        """An ended run leaves only unread data behind."""
        run, found = self.run, dict[str, int]()
        for server in (run.model, *(shard.model for shard in run.shards.values())):
            for key, value in server.keys.items():
                name = key.decode().rpartition("}:")[2]
                if name.partition(":")[0] in _BOUNDED:
                    found[name] = found.get(name, 0) + len(value.ids if hasattr(value, "ids") else value)
        found["shared memory"] = len(run.memory.files)
        setting = run.setting
        most = 20 + 10 * setting.workers + 4 * setting.window
        if more := {name: size for name, size in found.items() if size > most}:
            self.violate(f"the run has ended, and leaves {more} behind, which is more than {most}")

    def check_replay(self) -> None:
        """Each kept checkpoint comes out of the archive again, from the one before it in its lineage."""
        run = self.run
        if not run.setting.archive:
            return
        checkpoints = CheckpointStore(Store(run.bucket), run.run_id)
        ends = [id_order(segment.through) for segment in Archive(checkpoints.store, run.run_id).segments()]
        before: Checkpoint | None = None
        for name in checkpoints.names():
            with suppress(CheckpointError):
                loaded = checkpoints.load(name)
                if id_order(loaded.manifest.log_position) <= max(ends, default=(0, 0)):  # else it follows soon
                    self._check_from(before, loaded, checkpoints)
                    before = loaded

    def _check_from(self, before: Checkpoint | None, goal: Checkpoint, checkpoints: CheckpointStore) -> None:
        start, name = before.manifest.name if before else BEGINNING, goal.manifest.name
        if read_state(goal).lineage.version > (before.manifest.version if before else 0):
            return
        try:
            found = replay(checkpoints, self.run.config, checkpoints.description(), start, name)
        except ArchiveIncomplete as error:
            self._check_hole(str(error))
            return
        if not found.equal:
            self.violate(f"a replay from {start} to {name} comes to other bytes in {found.different}")
        self.replayed += found.versions

    def _check_hole(self, error: str) -> None:
        """Each hole in the archive has an entry that Redis lost, unless bodies were lost."""
        hole = re.search(r"lacks the log after (\S+) through (\S+);", error)
        after, through = map(id_order, hole.groups()) if hole else ((0, 0), (math.inf, 0))
        if not (self.run.bodies_lost or any(after < lost <= through for lost in self.run.lost)):
            self.violate(f"{error}; but Redis has lost nothing of that")


def _acted(fragment: Fragment) -> bytes:
    columns = [
        array for its in fragment.columns.values() for name, array in sorted(its.items()) if name[:3] in ("obs", "act")
    ]
    return hashlib.sha256(fragment.header.worker_id.encode() + b"".join(array.tobytes() for array in columns)).digest()


def watched(oracles: Oracles) -> type[Trainer]:
    """The trainer, which tells the oracles what it learns."""

    class Watched(Trainer):
        def _record(self, fragments: list[Fragment], metrics: dict[str, float]) -> None:
            oracles.learns(self, fragments)
            self._fragments = fragments
            super()._record(fragments, metrics)

        def _checkpoint_if_due(self, published: Any) -> None:
            oracles.learned_from(self, self._fragments)
            super()._checkpoint_if_due(published)

    return Watched
