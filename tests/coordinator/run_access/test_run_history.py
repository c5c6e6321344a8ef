"""Explanations, searches by halving, and what-ifs from a run's recorded log."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from stagecoach.coordinator.run_access.run import Run
from stagecoach.coordinator.run_access.run_history import Condition, _Halving
from stagecoach.shared.base.errors import ArchiveIncomplete, ConfigError, EnvironmentUnusable, RunExists, UserError
from stagecoach.shared.config.loading import parse_config
from stagecoach.shared.protocol.heartbeat import Wait, poll
from stagecoach.shared.storage.log_archive import Archive
from stagecoach.shared.storage.metric_log import VERSION, Rows
from tests.support.processes.command_line import Stagecoach

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(240)
PPO = {"name": "ppo", "epochs": 4, "minibatch_size": 64}
DQN = {"name": "dqn", "minibatch_size": 16, "gradient_steps_per_env_step": 0.1}


def learned(folder: Path, run_id: str, **sections: Any) -> Run:
    config = {
        "runs_dir": str(folder), "environment": {"id": "CartPole-v1", "num_envs": 4}, "algorithm": PPO,
        "rollout": {"workers": 3, "fragment_steps": 32, "fragments_per_update": 2}, "archive": "all",
        "checkpoint": {"every": "5 updates", "keep_last": 9}, "evaluation": {"episodes": 0},
        "stop_at": {"updates": 22},
    }  # fmt: skip
    run = Run.start(parse_config(config | sections), run_id, inline=True)
    run.wait()
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return learned(tmp_path_factory.mktemp("history"), "mine")


@pytest.mark.parametrize("start", ["start", "10_Step-2560.ckpt"])
def test_unchanged_what_if_is_the_run(run: Run, start: str) -> None:
    found = run.what_if(start, without=("1-0",))
    manifest = run.checkpoint_store().manifest(run.checkpoint_store().resolve("final"))
    assert found.final == manifest.name and found.left_out == {} and found.not_learned == 0
    for name in ("default/policy.safetensors", "trainer/default.algorithm.safetensors"):
        assert found.sha256[name] == manifest.objects[name].sha256, name
    assert found.ratios_outside == 0.0


def test_unchanged_what_if_with_replay_buffer_is_the_run(tmp_path: Path) -> None:
    run = learned(tmp_path, "q", algorithm=DQN)
    found = run.what_if("14_Step-2560.ckpt", without=("1-0",))
    manifest = run.checkpoint_store().manifest(run.checkpoint_store().resolve("final"))
    for name in ("default/policy.safetensors", "trainer/default.algorithm.safetensors"):
        assert found.sha256[name] == manifest.objects[name].sha256, name
    assert found.ratios_outside is None


def test_left_out_worker_is_counted_by_the_what_if(run: Run) -> None:
    first, second = (run.what_if(without=("worker-1",)) for _ in range(2))
    assert first.sha256 == second.sha256 and first.run_id != second.run_id
    made = Counter[str]()
    for item in run.experience():
        made[item.header.worker_id] += item.header.transitions
    assert first.left_out == {"worker-1": made["worker-1"]}
    assert first.env_steps == made["worker-0"] + made["worker-2"] - first.not_learned
    other = Run.attach(first.run_id, run.config.runs_dir)
    status = other.status()
    assert status.state == "finished" and status.reason == "what-if"
    assert all(line["balances"] for line in status.ledger.values())
    assert status.ledger["worker-1"]["dropped"]["left_out"]["transitions"] == made["worker-1"]
    assert status.ledger["total"]["produced"]["transitions"] == sum(made.values())
    versions = Rows.joined(list(other.metrics())).columns[VERSION].astype(int).tolist()
    assert versions == list(range(1, first.updates + 1))
    store = other.checkpoint_store()
    said = store.manifest(store.resolve("final")).provenance["what_if"]
    assert said == {"run_id": "mine", "from": "start", "to": "22_Step-5632.ckpt", "without": ["worker-1"], "set": []}
    assert all(verdict.state == "ok" for verdict in other.verify())
    assert other.evaluate("final", 2).scores["episodes"] == 2


def test_left_out_positions_are_not_learned(run: Run) -> None:
    positions = [item.position for item in run.experience()]
    found = run.what_if(without=(f"{positions[4]}..{positions[7]}",))
    assert sum(found.left_out.values()) == 4 * 32 * 4
    assert found.updates == 20


def test_changed_rate_learns_something_else(run: Run) -> None:
    found = run.what_if("10_Step-2560.ckpt", overrides=("algorithm.learning_rate=0.1",))
    manifest = run.checkpoint_store().manifest(run.checkpoint_store().resolve("final"))
    assert found.sha256["default/policy.safetensors"] != manifest.objects["default/policy.safetensors"].sha256
    assert found.ratios_outside is not None and 0 < found.ratios_outside < 1
    assert Run.attach(found.run_id, run.config.runs_dir).config.algorithm.learning_rate.start == 0.1


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, UserError, "needs a change"),
        ({"without": ("worker-7",)}, UserError, "worker-7: the run learned from worker-0, worker-1, worker-2"),
        ({"without": ("1-0..x",)}, UserError, "--without 1-0..x: expected a position"),
        ({"overrides": ("rollout.workers=2",)}, ConfigError, "rollout.workers: the experience was recorded with 3"),
        ({"overrides": ("algorithm.clip=1",)}, ConfigError, "clip"),
        ({"start": "10_Step-2560.ckpt", "overrides": ("policies.default.hidden_sizes=[8]",)}, ConfigError, "network"),
        ({"overrides": ("initialize_from=mine",)}, ConfigError, "begins with the run's own weights"),
        ({"without": ("worker-0", "worker-1", "worker-2")}, UserError, "nothing is left"),
        ({"without": ("worker-0",), "run_id": "mine"}, RunExists, "exists"),
    ],
)  # fmt: skip
def test_impossible_what_ifs_are_refused_and_leave_nothing(
    run: Run, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    before = sorted(path.name for path in run.folder.path.parent.iterdir())
    with pytest.raises(error, match=words):
        run.what_if(**arguments)
    assert sorted(path.name for path in run.folder.path.parent.iterdir()) == before


def test_new_run_is_beside_its_run_wherever_it_is_called(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = run.folder.path.parent.rename(tmp_path / "moved")
    try:
        monkeypatch.chdir(tmp_path)
        found = Run.attach("mine", other).what_if(without=("1-0",), run_id="there")
        assert Run.attach(found.run_id, other).status().state == "finished"
        assert [path.name for path in tmp_path.iterdir()] == ["moved"]
    finally:
        other.rename(run.folder.path.parent)


def test_killed_what_if_is_repeated_by_the_same_command(run: Run) -> None:
    arguments = ("what-if", "mine", "--without", "worker-2", "--run-id", "killed")
    folder = run.folder.path.parent
    started = folder / ".killed.what-if" / "s3"
    command = [sys.executable, "-m", "stagecoach", *arguments, "--runs-dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        poll(Wait("the what-if to begin", 60), lambda: any(started.rglob("*.safetensors")), 0.001)
        process.kill()
    assert not (folder / "killed").exists()
    found = run.what_if(without=("worker-2",), run_id="killed")
    assert found.sha256 == run.what_if(without=("worker-2",)).sha256
    assert not started.parent.exists() and (folder / "killed").exists()


def test_bisect_finds_the_first_row_of_a_metric(run: Run) -> None:
    rows = Rows.joined(list(run.metrics()))
    entropy = rows.columns["train/entropy"].tolist()
    bound = sorted(entropy)[len(entropy) // 2]
    first = next(number for number, value in enumerate(entropy) if value <= bound)
    found = run.bisect(f"train/entropy <= {bound!r}")
    assert (found.version, found.value, found.after_version) == (first + 1, entropy[first], first)
    with pytest.raises(UserError, match="did you mean train/entropy"):
        run.bisect("train/entropi > 0")
    with pytest.raises(UserError, match="does not hold in any"):
        run.bisect("train/entropy > 9")


def test_bisect_halves_between_versions_by_returns(run: Run) -> None:
    seen: list[str] = []
    store = run.checkpoint_store()
    condition = Condition.parse("return of 5 games > 0")
    look = _Halving(store, run.config, condition, 22, lambda text: None)
    values = [look._value(look._at(version)) for version in range(23)]
    bound = (min(values[:6]) + values[22]) / 2
    found = run.bisect(f"return of 5 games >= {bound}", progress=seen.append)
    assert values[found.version] >= bound > values[found.version - 1]
    assert (found.value, found.before) == (values[found.version], values[found.version - 1])
    assert found.replays <= 5 and len(seen) >= 3
    with pytest.raises(UserError, match="does not hold"):
        run.bisect("return of 5 games > 1000")
    with pytest.raises(UserError, match="and at the beginning"):
        run.bisect("return of 5 games >= 1")


@pytest.mark.parametrize(
    "when", ["return of games > 3", "return of 0 games > 3", "train/entropy = 3", "train/entropy > much", ""]
)
def test_unreadable_conditions_are_refused(run: Run, when: str) -> None:
    with pytest.raises(UserError, match="expected 'METRIC > NUMBER'"):
        run.bisect(when)


def test_runs_without_an_archive_name_the_setting(tmp_path: Path) -> None:
    run = learned(tmp_path, "bare", archive="off", stop_at={"updates": 3})
    for use in (lambda: run.explain(3), lambda: run.what_if(without=("worker-0",))):
        with pytest.raises(ArchiveIncomplete, match="archive=all"):
            use()
    assert [path.name for path in tmp_path.iterdir()] == ["bare"]


def test_explained_episodes_are_played_again(run: Run, tmp_path: Path) -> None:
    found = run.explain(20, 3)
    several = [found.episodes[0], next(its for its in found.episodes if its.last_step is None)]
    fragments = {item.position: item for item in run.experience()}
    for number, episode in enumerate(several):
        video = run.play_again(episode, tmp_path / "videos" / f"{number}.mp4")
        assert video.path.stat().st_size > 1000 and video.ended and video.other_reward_at is None
        assert (video.worker, video.environment) == (episode.worker, episode.slot)
        header = fragments[episode.position].header
        assert episode.acted_by == header.version and video.episode_return == video.steps
        if episode.last_step is not None:
            assert episode.mean_return == video.steps in [its.episode_return for its in header.episodes]


def test_first_step_that_differs_is_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step: Any = CartPoleEnv.step
    episode, calls = run.explain(20).episodes[0], [0]

    def overpaying(self: CartPoleEnv, action: Any) -> Any:
        observation, reward, *rest = step(self, action)
        return observation, 1000 * reward, *rest

    monkeypatch.setattr(CartPoleEnv, "step", overpaying)
    assert run.play_again(episode, tmp_path / "paid.mp4").other_reward_at == 1

    def drifting(self: CartPoleEnv, action: Any) -> Any:
        observation, *rest = step(self, action)
        calls[0] += 1
        return observation + (calls[0] == 4), *rest

    monkeypatch.setattr(CartPoleEnv, "step", drifting)
    with pytest.raises(EnvironmentUnusable, match=r"another observation than was recorded at step 5 of \d+ \(seed"):
        run.play_again(episode, tmp_path / "drifts.mp4")
    assert not (tmp_path / "drifts.mp4").exists()


def test_seed_is_found_behind_a_fragment_that_is_in_no_log(run: Run, tmp_path: Path) -> None:
    episode = next(its for its in run.explain(20, 3).episodes if its.worker == "worker-1")
    expected = run.play_again(episode, tmp_path / "whole.mp4")
    shutil.copytree(run.folder.path, tmp_path / "mine")
    less = Run.attach("mine", tmp_path)
    store = less.checkpoint_store()
    archive, lost = Archive(store.store, "mine"), [its.position for its in less.experience()
                                                  if its.header.worker_id == "worker-1"][1]  # fmt: skip
    for segment in archive.segments():
        kept = [entry for entry in archive.entries(segment.after, segment.through) if entry.id != lost]
        archive.delete(segment)
        archive.write(segment.after, segment.through, kept)
    found = less.play_again(episode, tmp_path / "less.mp4")
    assert (found.seed, found.episode) == (expected.seed, expected.episode)


def test_commands_print_what_was_found(run: Run, stagecoach: Stagecoach) -> None:
    where = ("--runs-dir", str(run.config.runs_dir))
    said = stagecoach("explain", "mine", "--version", "20", "--last", "3", *where).out
    assert "by worker: " in said and "learned again from 15_Step-3840.ckpt" in said
    said = stagecoach("explain", "mine", "--version", "20", "--by", "episode", "--video", "worst.mp4", *where).out
    assert "episodes, learned again" in said and "video: worst.mp4: environment " in said and "as recorded" in said
    assert Path("worst.mp4").read_bytes()[4:8] == b"ftyp"
    said = stagecoach("bisect", "mine", "--when", "train/entropy < 0.69", *where).out
    assert "stagecoach explain mine --version" in said
    said = stagecoach("what-if", "mine", "--without", "worker-2", "--run-id", "other", *where).out
    assert "other: " in said and "worker-2" in said
    said = stagecoach("checkpoints", "show", "other", "final", *where).out
    assert "worker-2" in said


def test_modules_of_the_run_are_imported(tmp_path: Path) -> None:
    """From another folder, by the handle alone, as the page has it."""
    folder = tmp_path / "mine"
    shutil.copytree(ROOT / "examples", folder)
    sets = {"archive": "all", "stop_at.env_steps": 2000, "stop_at.mean_return": "null", "evaluation.episodes": 0}
    options = [part for name, value in sets.items() for part in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "stagecoach", "train", "own_loss.yaml", "--inline", "--run-id", "own", *options]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    code = "import sys, stagecoach; print(stagecoach.Run.attach('own', sys.argv[1]).explain(2).influences[0].worker)"
    asked = [sys.executable, "-P", "-c", code, str(folder / "runs")]
    found = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout.startswith("worker-"), found
