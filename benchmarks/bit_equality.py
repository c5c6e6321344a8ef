"""Whether two commits learn the same: `python -m benchmarks.bit_equality BEFORE [AFTER] [--only ppo sac]`.

Checks out both, trains a run of each family of algorithms with the same seed in each, and compares what their last
checkpoints hold bit by bit: policies, critics, optimizers. It uses the command line alone, so that commits with
different modules can be compared; a config key that was renamed between them is given as `--renamed OLD=NEW`.
Exit code 1 where a family differs.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import yaml
from safetensors.numpy import load_file

from benchmarks.provenance import ROOT

_RUN: Mapping[str, Any] = {  # one worker in lockstep: with a lag, which version acted depends on arrival times
    "environment": {"id": "CartPole-v1", "num_envs": 4},
    "rollout": {"workers": 1, "max_policy_lag": 0},
    "evaluation": {"episodes": 2},
    "stop_at": {"env_steps": 3000},
}
_SMALL = {"policies": {"default": {"hidden_sizes": [32, 32]}}}
_PENDULUM = {"environment": {"id": "Pendulum-v1", "num_envs": 4}, **_SMALL}
_DATA = {"dataset": {"path": "recorded.csv", "evaluation": {"every_updates": 0}}, **_SMALL}

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "ppo": {"algorithm": "ppo"},
    "ppo-gru": {
        "algorithm": {"name": "ppo", "minibatch_size": 128},
        "policies": {
            "default": {"core": "gru", "share_encoder": True, "normalize_observations": True, "normalize_rewards": True}
        },
    },
    "ppo-rnd": {"algorithm": {"name": "ppo", "reward_signals": {"rnd": {}}}},
    "a2c": {"algorithm": "a2c"},
    "appo": {"algorithm": "appo"},
    "impala": {"algorithm": "impala"},
    "dqn": {"algorithm": {"name": "dqn", "replay_buffer": {"kind": "prioritized"}, "n_step": 3}, **_SMALL},
    "rainbow": {"algorithm": "rainbow", **_SMALL},
    "sac": {"algorithm": "sac", **_PENDULUM},
    "td3": {"algorithm": "td3", **_PENDULUM},
    "ddpg": {"algorithm": "ddpg", **_PENDULUM},
    "bc": {"algorithm": "bc", **_DATA},
    "iql": {"algorithm": "iql", **_DATA},
    "cql": {"algorithm": "cql", **_DATA},
}
"""Family → what its run's config has beside `_RUN`."""


def compare(before: str, after: str, families: Sequence[str], renamed: Mapping[str, str]) -> bool:
    """Trains, prints a line per family, and returns whether all are equal; `renamed`: name now → name in `before`."""
    equal = True
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        commits = {"before": before, "after": after}
        trees = [stack.enter_context(_checkout(Path(folder) / name, commit)) for name, commit in commits.items()]
        _record(Path(folder) / "recorded.csv")
        for family in families:
            config = {**_RUN, "algorithm": "ppo", **FAMILIES[family]}
            found = [
                _train(tree, Path(folder), family, _with_names(config, renamed) if number == 0 else config)
                for number, tree in enumerate(trees)
            ]
            same = found[0] == found[1]
            equal &= same
            print(f"{family:10} {'equal' if same else 'DIFFERENT'}: {sum(found[0].values())} tensors", flush=True)
    return equal


@contextlib.contextmanager
def _checkout(folder: Path, commit: str) -> Iterator[Path]:
    _git("worktree", "add", "--quiet", "--detach", str(folder), commit)
    try:
        yield folder
    finally:
        _git("worktree", "remove", "--force", str(folder))


def _git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=ROOT, check=True)


def _record(path: Path) -> None:
    """2000 transitions of random acting, as a dataset."""
    environment, random = gymnasium.make("CartPole-v1"), np.random.default_rng(1)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow([*(f"obs.{number}" for number in range(4)), "action", "reward", "terminated", "truncated"])
        observation, _ = environment.reset(seed=1)
        for _ in range(2000):
            action = int(random.integers(2))
            following, reward, terminated, truncated, _ = environment.step(action)
            table.writerow([*observation.tolist(), action, reward, int(terminated), int(truncated)])
            observation = environment.reset()[0] if terminated or truncated else following


def _with_names(value: Any, renamed: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {renamed.get(key, key): _with_names(item, renamed) for key, item in value.items()}
    return renamed.get(value, value) if isinstance(value, str) else value


def _train(
    tree: Path, folder: Path, family: str, config: Mapping[str, Any]
) -> Counter[tuple[str, tuple[int, ...], str]]:
    """What the last checkpoint holds: (dtype, shape, SHA-256) of each array; names may have changed between commits."""
    here = folder / f"{tree.name}-{family}"
    here.mkdir()
    (here / "recorded.csv").symlink_to(folder / "recorded.csv")
    (here / "run.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(config))))
    module, _, function = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["scripts"][
        "stagecoach"
    ].partition(":")
    command = f"import sys; from {module} import {function}; sys.argv[0] = 'stagecoach'; sys.exit({function}())"
    done = subprocess.run(
        [sys.executable, "-c", command, "train", "run.yaml", "--inline"],
        cwd=here, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": f"{tree / 'src'}:{tree}", "STAGECOACH_CODE_VERSION": tree.name},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{family} at {tree.name} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    checkpoints = sorted(here.glob("runs/*/s3/*/*/checkpoints/*.ckpt"), key=lambda path: int(path.name.split("_")[0]))
    arrays = [load_file(path) for path in sorted(checkpoints[-1].rglob("*.safetensors"))]
    return Counter(
        (str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).hexdigest())
        for file in arrays
        for name, array in file.items()
        if name != "positions"  # of the log's entries that a replay buffer holds: times of Redis' clock
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="a commit")
    parser.add_argument("after", nargs="?", default="HEAD", help="another; HEAD by default")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), help="families; all by default")
    parser.add_argument("--renamed", nargs="*", default=[], metavar="OLD=NEW", help="config keys and values")
    options = parser.parse_args()
    renamed = {new: old for old, new in (pair.split("=", 1) for pair in options.renamed)}
    sys.exit(not compare(options.before, options.after, options.only, renamed))


if __name__ == "__main__":
    main()
