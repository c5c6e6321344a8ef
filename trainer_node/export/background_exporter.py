"""The exporter: the kept checkpoints of a run as ONNX files, made beside the training, which never waits for them.

The checkpoint writer's thread only asks whether there is something to do; a process of low priority does it
(trainer_node/export/export_process.py). One at a time, and then a rest, so that it takes a small part of one core. The
best checkpoint comes first, then the newest. A failure is recorded beside the checkpoint, in an event and in `status`.
"""

import contextlib
import functools
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import redis
from pydantic import ValidationError

from stagecoach.shared.config.run_config import Config
from stagecoach.shared.errors import CheckpointDamaged, Fenced, ShardUnavailable, StoreError, StoreUnavailable
from stagecoach.shared.experience.log_entry import START, before
from stagecoach.shared.protocol.events import emit
from stagecoach.shared.protocol.experience_log import ExperienceLog
from stagecoach.shared.runtime.process import child_environment, end_with_parent
from stagecoach.shared.storage.checkpoint_store import CheckpointStore, Pointer
from stagecoach.shared.storage.export_record import ExportedPolicy, read_export, write_export
from stagecoach.trainer_node.export.export_process import Exported, Request, requested

_LOGGER = logging.getLogger("stagecoach.exporter")
_DEADLINE_SECONDS = 1800.0
_REST = 9.0
"""Times as long as an export took, none is begun: at most a tenth of a core goes there."""
_NICE = 10
"""On a machine without a free core it gets about a tenth of one."""
_ERROR_BYTES = 2000
"""Of the process's standard error are looked at, from its end."""


class _Child:
    """A process at work. Its input, output and errors are files without names, of which nothing is left behind."""

    def __init__(self, request: Request) -> None:
        self.export, self._policies = request.export, list(request.policies)
        self._out, self._errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self.rest_until = 0.0
        with tempfile.TemporaryFile() as told:
            told.write(request.model_dump_json().encode())
            told.seek(0)
            die, environ = end_with_parent(signal.SIGKILL), child_environment(OMP_NUM_THREADS="1")
            environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)

            def begin() -> None:
                die()
                os.nice(_NICE)

            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "stagecoach.trainer_node.export.export_process"],
                stdin=told, stdout=self._out, stderr=self._errors, env=environ, preexec_fn=begin,
            )  # fmt: skip
        self._started = time.monotonic()

    @property
    def due(self) -> bool:
        return self.process.poll() is not None or time.monotonic() - self._started > _DEADLINE_SECONDS

    @functools.cached_property
    def made(self) -> Exported:
        """What it has exported, once it is due; where it broke off or hung, a record that says so."""
        code, now = self.process.poll(), time.monotonic()
        self.rest_until = now + _REST * (now - self._started)
        self.process.kill()
        self.process.wait()
        self._out.seek(0)
        try:
            return Exported.model_validate_json(self._out.read())
        except ValidationError:
            failed = ExportedPolicy(failure=f"the exporting process {self._failure(code)}")
            policies = dict.fromkeys(self._policies, failed)
            return Exported(export=self.export.model_copy(update={"policies": policies}), files={})

    def _failure(self, code: int | None) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace")[-_ERROR_BYTES:].strip().splitlines()
        if code is None:
            why = f"took more than {_DEADLINE_SECONDS:g} s"
        else:
            why = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{why}{f': {lines[-1]}' if lines else ''}"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._out.close()
        self._errors.close()


class Exporter:
    """Exports what the store has and the config asks for."""

    def __init__(self, config: Config, client: redis.Redis, checkpoints: CheckpointStore) -> None:
        self._config, self._redis, self._checkpoints = config, client, checkpoints
        self.on = config.checkpoint.export != "off"
        self._names: list[str] = []
        self._first: list[str] = []
        self._done: set[str] = set()
        self._recorded: bytes | None = None
        self._child: _Child | None = None
        """Stays until the store has taken what it made."""
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
    def finished(self) -> bool:
        """Whether all that the pointer names has been exported, or has failed to be."""
        return not self.on or (self._child is None and self._done.issuperset(self._first))

    @property
    def due(self) -> bool:
        """Whether there is something to do now; no service is asked."""
        if self._child is not None:
            return self._child.due
        return self._next() is not None and (self.ending or time.monotonic() >= self._rest_until)

    def _next(self) -> str | None:
        wanted = [*self._first, *([] if self.ending else reversed(self._names))] if self.on else []
        return next((name for name in wanted if name in self._names and name not in self._done), None)

    def step(self) -> None:
        """Takes what a process has made, or starts one; raises as the store does, and is then called again."""
        name = self._child.export.checkpoint if self._child else self._next()
        try:
            if self._child is not None:
                self._store(self._child)
                self.close()
            elif name is not None:
                self._begin(name)
        except (StoreError, StoreUnavailable, Fenced, redis.RedisError):
            raise
        except Exception as error:  # of whatever kind: it is only an export
            self.close()
            self._done.add(name or "")
            self._tell(name or "", f"{type(error).__name__}: {error}")

    def close(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None

    def _begin(self, name: str) -> None:
        try:
            if read_export(self._checkpoints, name) is not None:  # of a former trainer
                self._done.add(name)
                return
        except CheckpointDamaged as error:
            _LOGGER.warning("%s; it is exported again", error)
        self._child = _Child(requested(self._checkpoints, name, self._config.model_dump(mode="json"), self._recorded))

    def _store(self, child: _Child) -> None:
        made, name = child.made, child.export.checkpoint
        self._rest_until = child.rest_until
        if name not in self._names:
            return  # pruned meanwhile
        write_export(self._checkpoints, made.export, made.files)
        self._done.add(name)
        _LOGGER.info("%s as ONNX: %s", name, made.export)
        self._tell(name, str(made.export) if made.export.failures else "")
        if made.export.other_choices:
            emit(self._redis, self._checkpoints.run_id, "export", f"{name} as ONNX {made.export}")

    def _tell(self, name: str, failure: str) -> None:
        """An event where it fails for the first time, or otherwise than before; `status` tells of the last failure."""
        known = self.told.get("error", "")
        self.told = {"checkpoint": name, "error": failure} if failure else {}
        if failure and failure != known:
            text = f"{name} cannot be exported as ONNX, training continues: {failure}"
            _LOGGER.warning("%s", text)
            emit(self._redis, self._checkpoints.run_id, "export", text)
