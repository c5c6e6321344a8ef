"""What must hold in a simulated run after each step, and at its end: counted here anew, from what server and store saw.

`Watched` is the product's trainer, which also shows what each version was learned from.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from stagecoach.shared.base.errors import ArchiveIncomplete, CheckpointError
from stagecoach.shared.experience.fragment import Fragment
from stagecoach.shared.experience.log_entry import STRANGERS, BodyPlace, id_order
from stagecoach.shared.protocol.scripts import NAMES, source
from stagecoach.shared.storage.checkpoint_store import Checkpoint, CheckpointStore
from stagecoach.shared.storage.log_archive import Archive
from stagecoach.trainer_node.replay import BEGINNING, replay
from stagecoach.trainer_node.state.snapshot import read_state
from stagecoach.trainer_node.trainer import Trainer
from tests.simulation.run import SimulatedRun
from tests.simulation.scheduler import Task
from tests.simulation.store import Store

PROGRESS_SECONDS = 30.0
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
    """Watches one run."""

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
    """The newest version, what the pointer named then, and which fragments were in the log."""
    published: int = -1
    violation: str = ""
    replayed: int = 0
    """Versions that a replay has learned again."""
    progress_at: float = 0.0
    """When the newest version was published."""

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
        if name in _FENCED:
            self._check_fence(name, int(args[source(name).args.index("epoch")]), reply)
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

    def _check_fence(self, name: str, epoch: int, reply: Any) -> None:
        """A trainer whose successor has taken over changes nothing."""
        now = self.run.epoch
        first = reply[0] if isinstance(reply, list) else reply
        if epoch < now and first not in _REFUSALS:
            self.violate(f"{name} of epoch {epoch} is answered {first!r}, and the epoch is {now}")

    def _published(self, given: dict[str, bytes], new: bool) -> None:
        version, history = int(given["version"]), given["history"].decode()
        blob = given["blob"]
        if place := BodyPlace.decode(given["place"]):
            blob = self.run.memory.files.get(f"policy:{place.field}", b"")
        digest = hashlib.sha256(blob).hexdigest()
        if blob and self.versions.setdefault((version, history), digest) != digest:
            self.violate(f"version {version} of history {history} has other weights than before")
        if new:
            self._at_publish = (version, history), self._pointed(), self._logged()
            self.published, self.progress_at = max(self.published, version), self.run.scheduler.now

    def _pointed(self) -> int:
        """The version of the checkpoint from which the next trainer would continue."""
        with suppress(ValueError):  # there is no pointer, or half of one
            return int(json.loads(self.run.bucket.objects.get(".checkpoint", b""))["latest"].partition("_")[0])
        return -1

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
        if claimed - consumed != holding and not (self.run.redis_restarts or self.run.bodies_lost):
            self.violate(f"{claimed - consumed} fragments are in flight, and {holding} claims and entries hold credit")
        if claimed < consumed:
            self.violate(f"{claimed} fragments were claimed, and {consumed} consumed")

    def _unread(self, flow: dict[bytes, bytes]) -> int:
        """Pushed entries behind the published version that are not dropped: each has credit."""
        decided = self.run.model.keys.get(self._key("quarantine"), {})
        read = max(id_order(flow.get(name, b"0-0").decode()) for name in (b"published_id", b"trimmed_id"))
        after = [id_ for id_, _ in self._pushes() if id_ > read]
        return sum(not decided.get(b"%d-%d" % id_, b"").startswith(b"dropped") for id_ in after)

    def _in_log(self) -> list[dict[bytes, bytes]]:
        """The entries that no published version has learned from or dropped."""
        committed = id_order(self.run.model.keys[self._key("flow")].get(b"committed_id", b"0-0").decode())
        return [push for id_, push in self._pushes() if id_ > committed]

    def check_ledger(self) -> None:
        """Per worker: what was produced was consumed, dropped, or lies in the log."""
        keys, waiting = self.run.model.keys, Counter[str]()
        for entry in self._in_log():
            waiting[entry[b"worker"].decode()] += 1 + int(entry[b"lost"])
        ledger = keys.get(self._key("ledger"), {})
        produced = keys.get(self._key("produced"), {})
        workers = {name.rpartition(b":")[0] for name in produced if name.endswith(b":fragments")}
        for worker in sorted(workers - {STRANGERS.encode()}):
            account = json.loads(ledger.get(worker, b'{"consumed":{"fragments":0},"dropped":{}}'))
            name, made = worker.decode(), int(produced[worker + b":fragments"])
            stale = int(produced.get(worker + b":fragments:stale", 0))
            consumed = account["consumed"]["fragments"]
            dropped = sum(count["fragments"] for count in account["dropped"].values())
            if made - stale != consumed + dropped + waiting[name]:
                self.violate(
                    f"{name} has produced {made} fragments; {consumed} were consumed, {dropped} dropped, "
                    f"{stale} refused, {waiting[name]} wait"
                )
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
        while parent is not None:
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
        (version, _), pointed, logged = self._at_publish
        while node is not None and node.version > pointed:
            if lost := {*node.names} - logged:
                self.violate(
                    f"version {version} is published, and {lost}, from which version {node.version} was learned, is "
                    f"neither in the log nor in a checkpoint (the newest is of version {pointed})"
                )
            node = node.parent

    # The store

    def _stored(self, key: str) -> None:
        objects = self.run.bucket.objects
        if key != ".checkpoint" and not key.startswith("checkpoints/"):
            return
        if ".checkpoint" not in objects:
            return
        try:
            pointer = json.loads(objects[".checkpoint"])
        except ValueError:  # half of it, which readers read again
            return
        for mark in ("latest", "best", "final"):
            if name := pointer.get(mark):
                self._check_checkpoint(mark, name, pointer["manifest_sha256"] if mark == "latest" else None)

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
        allowed = PROGRESS_SECONDS + 4 * self.run.setting.update_seconds
        if not self.run.over and self.run.scheduler.now - self.progress_at > allowed:
            why = f" ({self.run.resume_error!r})" if self.run.resume_error else ""
            self.violate(
                f"no version since {self.progress_at:.1f} s (version {self.published}); it is "
                f"{self.run.scheduler.now:.1f} s, and for {allowed:g} s nothing has happened to the run{why}"
            )
        self.check()

    def check_replay(self) -> None:
        """The newest checkpoint comes out of the archive again, from the oldest one of its lineage."""
        run = self.run
        if not run.setting.archive:
            return
        checkpoints = CheckpointStore(Store(run.bucket), run.run_id)
        ends = [segment.through for segment in Archive(checkpoints.store, run.run_id).segments()]
        whole = list[Checkpoint]()
        for name in checkpoints.names():
            with suppress(CheckpointError):
                loaded = checkpoints.load(name)
                if ends and id_order(loaded.manifest.log_position) <= max(map(id_order, ends)):  # it follows soon
                    whole.append(loaded)
        if not whole:
            return
        lineage, name = read_state(whole[-1]).lineage, whole[-1].manifest.name
        later = [each.manifest.name for each in whole if each.manifest.version >= lineage.version]
        start = later[0] if lineage.version else BEGINNING
        try:
            found = replay(checkpoints, run.config, checkpoints.description(), start, name)
        except ArchiveIncomplete as error:
            if not (run.redis_restarts or run.bodies_lost):  # else that is a hole, which the error names
                self.violate(str(error))
            return
        if not found.equal:
            self.violate(f"a replay from {start} to {name} comes to other bytes in {found.different}")
        self.replayed = found.versions


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
