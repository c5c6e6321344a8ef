"""Trains the policies of the playground into docs/assets/playground_policies.js: `python docs/playground_policies.py`.

A page that is opened as a file cannot fetch another file, so each policy.safetensors is base64 in a script.
"""

import base64
import sys
import tempfile
from pathlib import Path
from typing import Any

from stagecoach import Run, load_config

OUTPUT = Path(__file__).parent / "assets" / "playground_policies.js"
STEPS = 400_000
RUNS: dict[str, dict[str, Any]] = {
    "cartpole": {
        "environment": {"id": "CartPole-v1", "num_envs": 8},
        "algorithm": {
            "learning_rate": {"kind": "linear", "start": 1e-3, "end": 0, "over": "100000 env_steps"},
            "clip_range": {"kind": "linear", "start": 0.2, "end": 0, "over": "100000 env_steps"},
            "gamma": 0.99,
            "epochs": 10,
            "minibatch_size": 128,
        },
        "rollout": {"workers": 2, "fragment_steps": 32, "fragments_per_update": 2},
        "evaluation": {"num_envs": 20},
        "checkpoint": {"every": "10 updates"},
        "stop_at": {"env_steps": 100_000},
    },
    "tictactoe": {
        "environment": {"id": "classic/tictactoe-v3", "api": "pettingzoo", "num_envs": 32},
        "algorithm": {
            "name": "ppo",
            "learning_rate": {"kind": "linear", "start": 2e-3, "end": 0, "over": f"{STEPS} env_steps"},
            "entropy_coefficient": {"kind": "linear", "start": 0.1, "end": 0.02, "over": f"{STEPS} env_steps"},
            "gamma": 1.0,
            "epochs": 4,
            "minibatch_size": 512,
        },
        "rollout": {"workers": 2, "fragment_steps": 64, "fragments_per_update": 2},
        "league": {
            "snapshot": {"every": "20000 env_steps"},
            "opponents": {"latest": 0.5, "past": 0.2, "fixed": 0.3},
            "fixed": {"random": "random"},
        },
        "evaluation": {"episodes": 0},
        "checkpoint": {"every": "40000 env_steps"},
        "stop_at": {"env_steps": STEPS},
    },
}


def trained(name: str, runs_dir: str) -> bytes:
    """Trains; returns the last checkpoint's policy.safetensors."""
    common = {"policies": {"default": {"hidden_sizes": [64, 64]}}, "seed": 1, "runs_dir": runs_dir}
    run = Run.start(load_config(RUNS[name] | common), name)
    outcome = run.wait(1800)
    assert outcome.status.env_steps >= RUNS[name]["stop_at"]["env_steps"], outcome
    last = run.checkpoints()[-1]["name"]
    (file,) = Path(runs_dir, name).glob(f"s3/*/{name}/checkpoints/{last}/*/default/policy.safetensors")
    return file.read_bytes()


def main(runs_dir: str) -> None:
    """Trains both policies and writes the script that holds them."""
    lines = ["// Written by docs/playground_policies.py: policy.safetensors of two runs, as base64."]
    lines.append("globalThis.playgroundPolicies = {")
    lines += [f'  {name}: "{base64.b64encode(trained(name, runs_dir)).decode()}",' for name in RUNS]
    OUTPUT.write_text("\n".join([*lines, "};"]) + "\n")


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
