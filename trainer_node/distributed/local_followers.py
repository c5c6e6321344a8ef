"""The other ranks as processes of this machine, over loopback: for a replay, which has no trainer's group to join.

`python -m stagecoach.trainer_node.distributed.local_followers` is such a process; it reads what it needs from its
standard input.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict

import torch

from stagecoach.shared.base import world
from stagecoach.shared.base.errors import StagecoachError, UserError
from stagecoach.shared.base.printable import complain
from stagecoach.shared.base.process import child_environment
from stagecoach.shared.config.loading import parse_config
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.fragment import Fragment
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.policies.registry import torch_device
from stagecoach.trainer_node.distributed.leader import Leader, SingleProcess, follow
from stagecoach.trainer_node.distributed.process_group import GroupBroken, Invitation, Opening, join
from stagecoach.trainer_node.learning.learner import Learner, set_up_torch
from stagecoach.trainer_node.state.snapshot import Snapshot

_LOOPBACK = "127.0.0.1"
_START_SECONDS = 120.0
_MESSAGE_SECONDS = 600.0
"""Seconds that a process waits for the next message: a replay may read a slow store."""


@contextlib.contextmanager
def local_ranks(
    config: Config, learner: Learner, taken: Snapshot, description: EnvironmentDescription,
    held: Iterable[Fragment] = (),
) -> Iterator[SingleProcess | Leader]:  # fmt: skip
    """`learner`, of which `taken` is the snapshot, as rank 0 of as many ranks as the config says; its replay buffers
    hold `held` (`trainer_node/recovery/recovery.py: held`)."""
    if config.trainer.ranks == 1:
        yield SingleProcess()
        return
    if torch.distributed.is_initialized():
        raise UserError(
            f"trainer.ranks={config.trainer.ranks}: this process has a torch.distributed group of its own; "
            f"replay in another process, for example with `stagecoach replay`"
        )
    opening = Opening(_LOOPBACK, config.trainer.ranks, _MESSAGE_SECONDS)
    started: list[subprocess.Popen[str]] = []
    try:
        started.extend(_started(opening.invitation, rank, config) for rank in range(1, config.trainer.ranks))
        deadline = world.monotonic() + _START_SECONDS
        while missing := opening.missing():
            if world.monotonic() > deadline or any(process.poll() is not None for process in started):
                raise StagecoachError(f"the processes of ranks {missing} did not start; what they said is above")
            world.sleep(0.05)
        leader = Leader(opening.close(torch_device(config.trainer.device)), learner)
        try:
            leader.begin(taken, description, held)
            yield leader
            leader.close()
        finally:
            leader.leave()
    finally:
        for process in started:
            process.kill()
            process.wait()


def _started(invitation: Invitation, rank: int, config: Config) -> subprocess.Popen[str]:
    environ = child_environment(PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    command = [sys.executable, "-P", "-m", __name__]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environ, text=True)
    assert process.stdin is not None
    with process.stdin as told:
        json.dump({"invitation": asdict(invitation), "rank": rank, "config": config.model_dump(mode="json")}, told)
    return process


def main() -> int:
    told = json.load(sys.stdin)
    config = parse_config(told["config"])
    set_up_torch(config.trainer)
    invitation, device = Invitation(**told["invitation"]), torch_device(config.trainer.device)
    try:
        group = join(invitation, told["rank"], device, _MESSAGE_SECONDS, lambda: None)
        follow(group, config)
    except GroupBroken:
        return 1  # rank 0 tells why
    except StagecoachError as error:
        complain(f"rank {told['rank']}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
