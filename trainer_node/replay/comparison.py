"""Comparison: trains again from one checkpoint over the archived log, and compares what comes out with another.

On a CPU with the same PyTorch every object of the two checkpoints must be equal, byte for byte.
"""

from collections.abc import Callable
from dataclasses import dataclass

from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.storage.checkpoint_store import CheckpointStore
from stagecoach.trainer_node.replay.rerun import rerun
from stagecoach.trainer_node.state import snapshot


@dataclass(frozen=True)
class Replayed:
    start: str
    goal: str
    versions: int
    fragments: int
    env_steps: int
    different: tuple[str, ...]
    """The objects that did not come out as they are in the store."""
    sha256: dict[str, str]
    """Object → what came out."""
    unlike: tuple[str, ...]
    """Differences of code, PyTorch, device and threads, if an object is different."""

    @property
    def equal(self) -> bool:
        return not self.different


def replay(
    checkpoints: CheckpointStore, config: Config, description: EnvironmentDescription, start: str, goal: str,
    progress: Callable[[int, int], None] = lambda version, last: None,
) -> Replayed:  # fmt: skip
    """Trains from checkpoint `start` (or `start`, the beginning) to the version of checkpoint `goal`; `progress` gets
    the version reached and the last one. Raises as `rerun` does."""
    aim = checkpoints.load(goal)
    with rerun(checkpoints, config, description, start, aim) as again:
        steps_before = again.learner.counters.env_steps
        while again.version < aim.manifest.version:
            again.learn(again.take())
            progress(again.version, aim.manifest.version)
    out, versions = again.snapshot().checkpoint.manifest, again.version - again.begun
    env_steps = again.learner.counters.env_steps - steps_before
    found, expected = out.objects, aim.manifest.objects
    different = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    unlike = snapshot.unlike(aim.manifest, snapshot.written_with(out)) if different else []
    hashes = {name: item.sha256 for name, item in found.items()}
    fragments = versions * config.rollout.fragments_per_update
    return Replayed(start, aim.manifest.name, versions, fragments, env_steps, tuple(different), hashes, tuple(unlike))
