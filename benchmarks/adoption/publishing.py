"""A publisher in lockstep with real workers: each version is published when all of them wait for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks.adoption.noting import NOTES, read_notes
from stagecoach.shared.base.process import end_with_parent
from stagecoach.shared.config.loading import dump_config, parse_config
from stagecoach.shared.experience import fragment
from stagecoach.shared.experience.counters import Phase, PhaseCounters
from stagecoach.shared.experience.log_entry import START
from stagecoach.shared.policies.registry import build_policies
from stagecoach.shared.policies.serialization import VersionHeader, encode_board, state_arrays
from stagecoach.shared.protocol.flow_control import RunState
from stagecoach.shared.protocol.ledger import Ledger
from stagecoach.shared.protocol.policy_board import PolicyBoard
from stagecoach.shared.runtime.launch import RESOLVED_CONFIG, SERVICES, RoleLaunch
from stagecoach.trainer_node.checkpointing.checkpoint_writer import CheckpointWriter
from stagecoach.trainer_node.learning.learner import make_learner
from stagecoach.trainer_node.state import snapshot
from stagecoach.trainer_node.state.log_consumer import Committed
from stagecoach.trainer_node.state.snapshot import Progress

_ARRIVE_SECONDS = 90.0
_SETTLE_SECONDS = 0.03
"""After the last fragment of a version: by then every worker has claimed again, and waits."""


class LockstepPublisher:
    """The trainer of a run with `workers` fragments for each update, which learns nothing."""

    def __init__(self, launch: RoleLaunch, notes: Path, workers: int) -> None:
        self._role = launch.open("trainer")
        self._notes, self._workers = notes, workers
        memory = self._role.bodies.memory
        self._log, self._board = self._role.log(), PolicyBoard(self._role.redis, self._role.run_id, memory)
        self._epoch = self._role.flow.take_over(memory=memory.token)
        description = self._role.description()
        algorithm = self._role.config.algorithm.resolved()
        self._policies = build_policies(description.policies, self._role.config.policies, algorithm, seed=0)
        self.parameters = sum(tensor.numel() for policy in self._policies.values() for tensor in policy.parameters())
        self.board_bytes = 0
        self._position, self._version = START, -1
        self._first_checkpoint()

    def measure(self, versions: int) -> tuple[list[float], list[float]]:
        """Milliseconds from the start of each publication to each worker's first step with that version.

        The second list begins the clock earlier: before the weights are copied and encoded.
        """
        published, encoded, heard = {}, {}, []
        for _ in range(versions):
            encoded[self._version + 1] = time.monotonic_ns()
            blob = self._encode()
            published[self._version + 1] = time.monotonic_ns()
            self._publish(blob)
            heard += self._hear()
            time.sleep(_SETTLE_SECONDS)
        notes = {worker: read_notes(self._notes / worker) for worker in {worker for worker, _, _ in heard}}
        acted = [(version, notes[worker][seq]) for worker, seq, version in heard]
        times = [[(at - since[version]) / 1e6 for version, at in acted] for since in (published, encoded)]
        return times[0], times[1]

    def warm_up(self, versions: int) -> None:
        """The first fragments, for which processes start and libraries are loaded; all workers have come after it."""
        seen: set[str] = set()
        deadline = time.monotonic() + _ARRIVE_SECONDS
        while len(seen) < self._workers or versions > 0:
            self._publish(self._encode())
            seen |= {worker for worker, _, _ in self._hear()}
            versions -= 1
            time.sleep(_SETTLE_SECONDS)
            if time.monotonic() > deadline:
                raise RuntimeError(f"only {sorted(seen)} of {self._workers} workers have acted; see {self._notes}")

    def end(self) -> None:
        """The workers end by themselves."""
        self._role.flow.set_state(RunState.FINISHED, "exhausted", epoch=self._epoch)

    def close(self) -> None:
        """After the workers have ended."""
        self._role.redis.close()

    def _encode(self) -> bytes:
        header = VersionHeader(self._version + 1, Phase.TRAIN, PhaseCounters())
        states = {policy_id: state_arrays(policy) for policy_id, policy in self._policies.items()}
        blob = encode_board(states, header)
        self.board_bytes = len(blob)
        return blob

    def _publish(self, blob: bytes) -> None:
        """With the credit for as many fragments as there are workers."""
        self._version += 1
        self._board.publish(
            epoch=self._epoch, version=self._version, consumed=self._workers if self._version else 0,
            committed_id=self._position, ledger=Ledger(), blob=blob,
            header=VersionHeader(self._version, Phase.TRAIN, PhaseCounters()),
        )  # fmt: skip

    def _hear(self) -> list[tuple[str, int, int]]:
        """The fragments acted by this version: worker, its how manieth, and the version in its header."""
        heard: list[tuple[str, int, int]] = []
        deadline = time.monotonic() + _ARRIVE_SECONDS
        while len(heard) < self._workers:
            for entry in self._log.read(self._position, self._workers - len(heard), 1.0):
                self._position = entry.id
                assert entry.fragment is not None
                heard.append((entry.worker, entry.seq, fragment.decode(entry.fragment).header.version))
            if time.monotonic() > deadline:
                raise RuntimeError(f"{len(heard)} of {self._workers} fragments of version {self._version} came")
        self._log.trim(self._epoch, self._position)
        return heard

    def _first_checkpoint(self) -> None:
        """What workers start from."""
        role, description = self._role, self._role.description()
        learner, progress = make_learner(role.config, description), Progress(0, 1)
        accounting = Committed(START, Ledger().as_json(), {})
        writer = CheckpointWriter.start(role, (self._epoch, 0, 0, 0))
        writer.submit(snapshot.take(learner, role.config, role.run_id, progress, accounting))
        writer.wait_idle(60)
        writer.close()


@contextmanager
def worker_processes(launch: RoleLaunch, notes: Path, workers: int) -> Iterator[None]:
    """`python -m stagecoach.rollout_worker` for each; what still runs at the end is killed."""
    folder = Path(str(launch.run_folder))
    (folder / RESOLVED_CONFIG).write_text(dump_config(parse_config(launch.config)))
    services = {"address": asdict(launch.address), "import_path": launch.import_path}
    (folder / SERVICES).write_text(json.dumps(services))
    command = [sys.executable, "-m", "stagecoach.rollout_worker", folder.name, "--runs-dir", str(folder.parent)]
    processes = []
    try:
        for index in range(workers):
            told = {NOTES: str(notes / f"worker-{index}")}
            with (Path(str(launch.run_folder)) / "logs" / f"worker-{index}.out").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [*command, "--index", str(index)], env=os.environ | told, stdout=log, stderr=log,
                        preexec_fn=end_with_parent(signal.SIGKILL),
                    )
                )  # fmt: skip
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
