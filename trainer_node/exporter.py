"""The exporter: the kept checkpoints of a run as ONNX files, made beside the training and never waited for by it.

It runs in the publisher's thread, which only looks whether there is something to do: the work is that of a process of
its own, of low priority (trainer_node/export_child.py). One at a time, and then a rest, so that it takes a small part
of one core. What is pointed to comes first: the best checkpoint, then the newest. Whatever fails there is recorded
beside the checkpoint and told in an event and in `status`; nothing else follows from it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

import redis

from shared import tensor_blob
from shared.checkpoint import CheckpointStore, Manifest, Pointer
from shared.child import child_environment, end_with_parent
from shared.errors import CheckpointDamaged, Fenced, ShardUnavailable, StoreError, StoreUnavailable
from shared.events import emit
from shared.experience_log import START, ExperienceLog, before
from shared.exports import Export, ExportedPolicy, read_export, write_export
from shared.role import Role
from trainer_node.export_child import Answer, Request

_LOGGER = logging.getLogger("stagecoach.exporter")
_POLICY = "/policy.safetensors"
_DEADLINE_SECONDS = 1800.0
"""An export that takes longer than this is given up."""
_REST = 9.0
"""Times as long as an export took, none is begun: at most a tenth of a core goes there."""
_NICE = 10
"""On a machine without a free core it gets about a tenth of one."""
_SAID = 2000


@dataclass
class _Child:
    """A process at work."""

    manifest: Manifest
    manifest_sha256: str
    policies: tuple[str, ...]
    process: subprocess.Popen[bytes]
    out: IO[bytes]
    said: IO[bytes]
    """Its standard error."""
    started: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.out.close()
        self.said.close()


class Exporter:
    """Exports what the store has and the config asks for."""

    def __init__(self, role: Role, checkpoints: CheckpointStore) -> None:
        self._role = role
        self._checkpoints = checkpoints
        self.on = role.config.checkpoint.export != "off"
        self._names: list[str] = []
        self._first: list[str] = []
        """Those that the pointer names."""
        self._done: set[str] = set()
        self._recorded: bytes | None = None
        self._child: _Child | None = None
        self._made: tuple[_Child, Answer] | None = None
        """What the store has not taken yet."""
        self._rest_until = 0.0
        self.ending = False
        """The run ends: what the pointer names is exported at once, and nothing else."""
        self.told: dict[str, str] = {}
        """For `status`: the last export that failed, until one works."""

    def know(self, names: Sequence[str], pointer: Pointer) -> None:
        """What the store holds now, oldest first, and what is pointed to."""
        named = (pointer.best, pointer.final, pointer.latest)
        self._names, self._first = list(names), list(dict.fromkeys(name for name in named if name))
        self._done &= set(names)

    def remember(self, log: ExperienceLog, position: str) -> None:
        """The log's last entry through a checkpoint, before it is trimmed: recorded observations to compare with."""
        if not self.on or position == START:
            return
        with contextlib.suppress(ShardUnavailable):
            entry = next(log.between(before(position), position), None)
            if entry is not None and entry.fragment and not entry.quarantined:
                self._recorded = entry.fragment

    @property
    def settled(self) -> bool:
        """Whether all that the pointer names has been exported, or has failed to be."""
        return not self.on or (self._child is None and self._made is None and self._done.issuperset(self._first))

    @property
    def due(self) -> bool:
        """Whether there is something to do now; asks nobody."""
        if not self.on:
            return False
        if self._child is not None:
            return self._child.process.poll() is not None or self._child.seconds > _DEADLINE_SECONDS
        if self._made is not None:
            return True
        return self._next() is not None and (self.ending or time.monotonic() >= self._rest_until)

    def _next(self) -> str | None:
        others = [] if self.ending else list(reversed(self._names))
        return next((name for name in [*self._first, *others] if name in self._names and name not in self._done), None)

    def step(self) -> None:
        """Takes what a process has made, or starts one; raises as the store does, and is then called again."""
        present = self._child or (self._made[0] if self._made else None)
        name = present.manifest.name if present else self._next() or ""
        try:
            self._turn(name)
        except (StoreError, StoreUnavailable, Fenced, redis.RedisError):
            raise
        except Exception as error:  # of whatever kind: it is only an export
            self._made = None
            self._done.add(name)
            self._tell(name, f"{type(error).__name__}: {error}")

    def _turn(self, name: str) -> None:
        if self._child is not None:
            child, self._child = self._child, None
            self._rest_until = time.monotonic() + _REST * child.seconds
            self._made = (child, _collected(child))
        if self._made is not None:
            self._store(*self._made)
            self._made = None
        elif name:
            self._begin(name)

    def close(self) -> None:
        """Ends what is at work."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def _begin(self, name: str) -> None:
        if _holds(self._checkpoints, name):
            self._done.add(name)
            return
        data, manifest = self._checkpoints.read_manifest(name)
        policies = {
            key.removesuffix(_POLICY): self._checkpoints.read_object(manifest, key)
            for key in manifest.objects
            if key.endswith(_POLICY)
        }
        config = self._role.config.model_dump(mode="json")
        request = Request(config, manifest, policies, self._recorded)
        self._child = _started(request, hashlib.sha256(data).hexdigest())

    def _store(self, child: _Child, answer: Answer) -> None:
        name = child.manifest.name
        if name not in self._names:
            return  # pruned meanwhile
        export = Export(
            checkpoint=name, manifest_sha256=child.manifest_sha256, created=round(time.time(), 3),
            made_with=answer.made_with, policies=dict(answer.policies),
        )  # fmt: skip
        write_export(self._checkpoints, export, answer.files)
        self._done.add(name)
        _LOGGER.info("%s as ONNX: %s", name, export)
        self._tell(name, str(export) if export.failures else "")
        if export.other_choices:
            emit(self._role.redis, self._role.run_id, "export", f"{name} as ONNX {export}")

    def _tell(self, name: str, failure: str) -> None:
        """An event where it fails for the first time, or otherwise than before; `status` tells of the last failure."""
        known = self.told.get("error", "")
        self.told = {"checkpoint": name, "error": failure} if failure else {}
        if failure and failure != known:
            text = f"{name} cannot be exported as ONNX, training goes on: {failure}"
            _LOGGER.warning("%s", text)
            emit(self._role.redis, self._role.run_id, "export", text)


def _holds(checkpoints: CheckpointStore, name: str) -> bool:
    """Whether a former trainer has exported it."""
    try:
        return read_export(checkpoints, name) is not None
    except CheckpointDamaged as error:
        _LOGGER.warning("%s; it is exported anew", error)
        return False


def _started(request: Request, manifest_sha256: str) -> _Child:
    """Its input, output and errors are files without names: nothing is left of them whoever dies."""
    out, said = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
    with tempfile.TemporaryFile() as told:
        told.write(request.encode())
        told.seek(0)
        die, environ = end_with_parent(signal.SIGKILL), child_environment(OMP_NUM_THREADS="1")
        environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)

        def begin() -> None:
            die()
            os.nice(_NICE)

        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainer_node.export_child"], stdin=told, stdout=out, stderr=said, env=environ,
            preexec_fn=begin,
        )  # fmt: skip
    return _Child(request.manifest, manifest_sha256, tuple(request.policies), process, out, said, time.monotonic())


def _collected(child: _Child) -> Answer:
    """The answer of a process that has ended; of one that broke off or hangs, why there is none."""
    hangs = child.process.poll() is None
    code = child.process.poll()
    child.process.kill()
    child.process.wait()
    try:
        child.out.seek(0)
        return Answer.decode(child.out.read())
    except tensor_blob.BlobError:
        child.said.seek(0)
        lines = child.said.read().decode(errors="replace")[-_SAID:].strip().splitlines()
        why = f"took more than {_DEADLINE_SECONDS:g} s" if hangs else _ended(code or 0)
        failure = f"the exporting process {why}{f': {lines[-1]}' if lines else ''}"
        return Answer({}, {policy_id: ExportedPolicy(failure=failure) for policy_id in child.policies}, {})
    finally:
        child.out.close()
        child.said.close()


def _ended(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
