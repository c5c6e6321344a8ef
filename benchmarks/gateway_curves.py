"""`python -m benchmarks.gateway_curves`: CartPole in process, and through a gateway, acted by it or by the client.

Printed for each seed: learned env steps until the mean of the last 20 training episodes is 475 (outside runs have no
evaluator), in the order of the log, and the share of turns that came too late to be learned from. All runs have the
hyperparameters of examples/cartpole.yaml, with one worker of 16 environments in place of two of 8.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium
import yaml

from benchmarks.kit.outside import SPACES, address
from benchmarks.kit.station import Station
from benchmarks.provenance import ROOT
from stagecoach.coordinator.run_access.run import Run
from stagecoach.rollout_worker.gateway.tokens import add_token
from stagecoach.shared.config.loading import parse_config
from stagecoach.shared.storage.log_archive import read_experience

_SESSIONS, _GATE, _EPISODES = 16, 475.0, 20
_WAYS = ("in process", "remote", "local")


class Clients:
    """Sessions of the reference client, a thread each (for a `Station`)."""

    def __init__(self, url: str, token: str, seed: int, local: bool) -> None:
        sys.path.insert(0, str(ROOT / "clients" / "python"))
        self._client, policy = importlib.import_module("stagecoach_client"), None
        if local:
            policy = importlib.import_module("stagecoach_policy").Policy
        self._seed, self._sessions = seed, [
            self._client.Session(url, token, str(number), policy=policy) for number in range(_SESSIONS)
        ]  # fmt: skip

    def play(self) -> None:
        """Plays until the process is ended."""
        with ThreadPoolExecutor(_SESSIONS) as pool:
            for number, session in enumerate(self._sessions):
                first = 10**6 * self._seed + 10**4 * number
                pool.submit(self._client.play, gymnasium.make("CartPole-v1"), session, 10**4, first)


def steps_to_gate(way: str, seed: int, env_steps: int) -> tuple[float, int, float]:
    """Runs it; returns learned steps to the gate (infinite if not reached), updates, and the share of late turns."""
    example = yaml.safe_load((ROOT / "examples" / "cartpole.yaml").read_text())
    inside = {"id": "CartPole-v1", "num_envs": _SESSIONS}
    outside = {"id": "cartpole", "api": "external", "num_envs": _SESSIONS, "spaces": SPACES}
    with tempfile.TemporaryDirectory(prefix="curves-", ignore_cleanup_errors=True) as folder:
        config = {
            "runs_dir": folder, "environment": inside if way == _WAYS[0] else outside, "seed": seed,
            "algorithm": example["algorithm"], "evaluation": {"episodes": 0}, "archive": "all",
            "rollout": {"workers": 1, "fragment_steps": 32, "fragments_per_update": 1},
            "stop_at": {"env_steps": env_steps},
        } | ({} if way == _WAYS[0] else {"gateway": {"port": 0}})  # fmt: skip
        run, station = Run.start(parse_config(config), "run", inline=True), None
        if way != _WAYS[0]:
            token = add_token(run.checkpoint_store().store, "carts")
            station = Station(Clients, address(run), token, seed, way == "local")
            station.begin("play")
        run.wait(1200)
        if station is not None:
            station.close()
        total: dict[str, Any] = run.status().ledger["total"]
        late = total["dropped"].get("stale", {}).get("transitions", 0)
        return *_reached(run), late / (late + total["consumed"]["transitions"])


def _reached(run: Run) -> tuple[float, int]:
    steps, updates, returns = 0, 0, list[float]()
    for updates, fragment in enumerate(read_experience(run.folder.path / "s3" / "stagecoach" / run.run_id), 1):
        steps += int(fragment.columns["default"]["mask"].sum())
        for record in fragment.header.episodes:
            returns.append(record.episode_return)
            if len(returns) >= _EPISODES and statistics.mean(returns[-_EPISODES:]) >= _GATE:
                return steps, updates
    return float("inf"), updates


def main() -> None:
    """Prints a line for each run, then the medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--env-steps", type=int, default=100_000)
    given = parser.parse_args()
    found: dict[str, list[float]] = {way: [] for way in _WAYS}
    for seed in range(given.seeds):
        for way in _WAYS:
            steps, updates, late = steps_to_gate(way, seed, given.env_steps)
            found[way].append(steps)
            print(f"seed {seed}  {way:10}  {steps:8.0f} steps  {updates} updates  late {late:.1%}", flush=True)
    first = statistics.median(found[_WAYS[0]])
    for way, its in found.items():
        print(f"{way:10}  median {statistics.median(its):8.0f} steps, {statistics.median(its) / first:.2f} ×")


if __name__ == "__main__":
    main()
