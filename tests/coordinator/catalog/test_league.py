"""A league from the outside: fixed players from other runs, files and code; `stagecoach league`, status, the page."""

from __future__ import annotations

import hashlib
import json
import shutil
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import torch
from onnx import TensorProto, helper

from stagecoach.coordinator.catalog.fixed_players import with_fixed_players
from stagecoach.coordinator.catalog.league import league_of, match
from stagecoach.coordinator.catalog.run_folder import RunFolder
from stagecoach.coordinator.cli.league import _matrix
from stagecoach.coordinator.lifecycle import launcher, preparation
from stagecoach.coordinator.lifecycle.doctor import examine
from stagecoach.coordinator.lifecycle.supervisor import Coordinator
from stagecoach.coordinator.page.server import serve
from stagecoach.coordinator.run_access.run import Run
from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.shared.base.errors import CheckpointDamaged, CheckpointNotFound, ConfigError
from stagecoach.shared.base.printable import figure
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.deployment.deployed_policy import load_policy
from stagecoach.shared.league.table import MatchTable, player_hash
from stagecoach.shared.policies.serialization import decode_policy
from stagecoach.shared.storage.checkpoint_store import CheckpointStore, Pointer
from stagecoach.shared.storage.players import LEAGUE, snapshots_in
from stagecoach.shared.storage.shared_objects import SHARED_OBJECTS, read_shared_object, write_shared_object
from tests.support.environments.small import CHASE, CHASE_POLICIES
from tests.support.processes.command_line import Stagecoach, check_refused
from tests.support.suite.groups import some_quick

NO_FUNCTION = 3


class Killed(BaseException):
    """Stands for SIGKILL: no `except` of the product's sees it."""


ENVIRONMENT = CHASE | {"kwargs": {"cat_steps": 3, "mouse_steps": 5, "counts": False}}
MakeConfig = Callable[..., Config]


@pytest.fixture
def chase(config: MakeConfig) -> MakeConfig:
    """`chase(league, **sections)`: a small run of a cat and a mouse."""

    def make(league: dict[str, Any], **sections: Any) -> Config:
        common = {"environment": ENVIRONMENT, "evaluation": {"episodes": 0}, "stop_at": {"updates": 3}}
        return config(league={"snapshot": {"every": "3 episodes"}} | league, **(common | CHASE_POLICIES | sections))

    return make


def played(config: Config, run_id: str) -> Run:
    run = Run.start(config, run_id, inline=True)
    assert run.wait(120).reason == "exhausted"
    return run


def line_of(table: str, name: str) -> str:
    return next(line for line in table.splitlines() if line.startswith(name))


def table_of(run: Run) -> MatchTable:
    checkpoints = run.checkpoint_store()
    return MatchTable.from_dict(checkpoints.manifest(checkpoints.resolve("latest")).provenance["folds"]["league"])


def test_player_of_another_run_is_copied_and_stays_fixed(chase: MakeConfig) -> None:
    """Also once the other run is gone; it is drawn where its spaces fit alone."""
    first = played(chase({}), "first")
    fixed = {"rival": "first/latest#hunter", "dice": "random", "script": "tests.support.environments.games:takes_one"}
    shares = {"latest": 0.5, "past": 0, "fixed": 0.5}
    config = chase({"fixed": fixed, "opponents": shares})
    second = played(config, "second")
    rival = (
        first.checkpoint_store().load(first.checkpoint_store().resolve("latest")).objects["hunter/policy.safetensors"]
    )
    store = second.checkpoint_store().store
    assert read_shared_object(store, player_hash(rival)) == rival
    table = table_of(second)
    assert dict(table.learners["prey"].opponents["hunter"]) == {"hunter": 0.5} | dict.fromkeys(fixed, 1 / 6)
    assert dict(table.learners["hunter"].opponents["prey"]) == {"prey": 0.5, "dice": 0.25, "script": 0.25}
    assert {name: player.kind for name, player in table.players.items() if name in fixed} == {
        "rival": "policy", "dice": "random", "script": "function",
    }  # fmt: skip
    shutil.rmtree(first.folder.path)
    resumed = Run.resume("second", config.runs_dir, overrides=("stop_at.updates=4",), inline=True)
    assert resumed.wait(120).reason == "exhausted"
    assert table_of(resumed).players["rival"] == table.players["rival"]
    again = chase({"fixed": fixed, "opponents": shares}, stop_at={"updates": 5})
    resumed = Run.start(again, "second", inline=True, or_resume=True)
    assert resumed.wait(120).reason == "exhausted" and resumed.status().version >= 5
    copied = resumed.export(config.runs_dir / "copied", "latest").parents[1]
    assert player_hash(rival) in {path.name for path in (copied / SHARED_OBJECTS).iterdir()}, "with its league"


def test_players_with_different_critic_views_play_each_other(chase: MakeConfig) -> None:
    sees_more = {name: {"critic_observes": "state"} for name in ("hunter", "prey")}
    first = played(chase({}, policies=sees_more), "first")
    rivals = {f"old_{name}": f"first/latest#{name}" for name in ("hunter", "prey")}
    half = {"latest": 0.5, "past": 0, "fixed": 0.5}
    second = played(chase({"fixed": rivals, "opponents": half}), "second")
    assert table_of(second).players["old_prey"].seats == ("prey",)
    rivals = {name: source.replace("first", "second") for name, source in rivals.items()}
    third = played(chase({"fixed": rivals, "opponents": half}, policies=sees_more), "third")
    assert any(
        row["matches"]
        for row in league_of(third.checkpoint_store(), third.config)["players"]
        if row["player"] in rivals
    )
    assert match("first#hunter", "third#prey", 4, first.config.runs_dir).games >= 4


def test_initial_policy_is_first_player_of_league(chase: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    two = {"workers": 2, "fragment_steps": 8, "fragments_per_update": 2}
    first = played(chase({}, rollout=two), "first")
    said = [event.text for event in first.events() if "are judged" in event.text]
    judged = "outcomes of matches are judged by comparing the sides' returns, since no agent had a number in info"
    assert said == [f"{judged}['outcome']"], "once, not by each worker"
    second = played(chase({}, initialize_from="first/latest"), "second")
    (begun, *_), store = second.checkpoint_store().names(), second.checkpoint_store().store
    checkpoint = second.checkpoint_store().load(begun)
    listed, objects = checkpoint.manifest.provenance["shared_objects"], checkpoint.objects
    for policy in ("hunter", "prey"):
        data = objects[f"{policy}/policy.safetensors"]
        assert player_hash(data) in listed
        assert read_shared_object(store, player_hash(data)) == data
    assert "are met in evaluations alone" not in " ".join(event.text for event in second.events())
    examined = {finding.name: finding for finding in examine(chase({}, initialize_from="first/latest#second"))}
    assert "has no policy 'second'" in examined["players and beginnings"].text
    monkeypatch.setattr(launcher, "Coordinator", None)
    with pytest.raises(ConfigError, match="has no policy 'second'; it has hunter, prey"):  # before anything starts
        Run.start(chase({}, initialize_from="first/latest#second"), "third", inline=True)


def test_fixed_players_are_resolved_despite_copied_config(chase: MakeConfig) -> None:
    """Its policies may have had other names."""
    played(chase({}), "first")
    fresh = chase({"fixed": {"rival": "first/latest#hunter"}})
    found = with_fixed_players(fresh, describe_environment(fresh))[0].league
    assert found is not None and found.fixed["rival"].seats == ("hunter",)
    stale = found.fixed["rival"].model_copy(update={"seats": ("other",), "kind": "onnx"})
    config = chase({"fixed": {"rival": stale.model_dump()}})
    again = with_fixed_players(config, describe_environment(config))[0].league
    assert again is not None and again.fixed == found.fixed
    kept = with_fixed_players(config, describe_environment(config), before=config)[0].league
    assert kept is not None and kept.fixed["rival"] == stale, "a resume has what it had"
    run = played(chase({"fixed": {"rival": "first/latest#hunter"}}, checkpoint={"best_by": "hunter"}), "second")
    with pytest.raises(ConfigError, match=r"best_by=prey cannot change in a resume: .* are ranked by hunter"):
        Run.resume(
            "second", run.config.runs_dir, overrides=("checkpoint.best_by=prey", "stop_at.updates=9"), inline=True
        )


def test_policy_starts_from_snapshot_of_another_league(chase: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = played(chase({}), "first")
    ids = [row["player"] for row in league_of(first.checkpoint_store(), first.config)["players"]]
    snapshot = max(its for its in ids if its.startswith("hunter-"))
    begins = {"hunter": {"initialize_from": f"first#{snapshot}"}, "prey": {}}
    second = played(chase({}, policies=begins), "second")
    begun = second.checkpoint_store().load(second.checkpoint_store().names()[0])
    store = first.checkpoint_store()
    listed = snapshots_in(store.load(store.resolve("latest"), only=LEAGUE).objects[LEAGUE])
    then = decode_policy(read_shared_object(store.store, listed[snapshot]))[0]  # of whatever version
    now = decode_policy(begun.objects["hunter/policy.safetensors"])[0]
    assert all(torch.equal(tensor, now.state_dict()[name]) for name, tensor in then.state_dict().items())
    assert begun.manifest.provenance["initialized_from"]["summary"].startswith(f"hunter: {snapshot} of ")
    monkeypatch.setattr(launcher, "Coordinator", None)
    with pytest.raises(ConfigError, match=r"has no policy 'hunter-x'; it has hunter, prey.*or a snapshot"):
        Run.start(chase({}, policies=begins | {"hunter": {"initialize_from": "first#hunter-x"}}), "third", inline=True)


def test_rollback_removes_players_of_abandoned_line(chase: MakeConfig) -> None:
    kept = {"checkpoint": {"every": "1 updates", "keep_last": 2}}
    run = played(chase({"players": 4}, **kept), "cats")
    abandoned = write_shared_object(run.checkpoint_store().store, b"of a trainer that was killed before its checkpoint")
    origin = run.checkpoint_store().names()[0]
    run = Run.resume("cats", run.config.runs_dir, ("stop_at.updates=9",), inline=True, origin=origin)
    assert run.wait(120).reason == "exhausted"
    checkpoints = run.checkpoint_store()
    listed = [checkpoints.manifest(name).provenance["shared_objects"] for name in checkpoints.names()]
    there = {key.removeprefix(SHARED_OBJECTS) for key in checkpoints.store.keys(SHARED_OBJECTS)}
    assert there == {sha256 for its in listed for sha256 in its} and abandoned not in there


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nobody/best", "league.fixed.one=nobody/best: .*no run"),
        ("a", "was trained with other observation or action spaces than those of hunter, prey"),
        ("a#second", r"has no policy 'second'; choose one: a#default"),
        ("builtins:nothing", "league.fixed.one=builtins:nothing cannot be imported"),
        (f"{__name__}:NO_FUNCTION", "is not a function"),
        ("builtins:len", "cannot be called with two arguments: too many positional arguments; expected one that"),
        ("missing.onnx", "cannot be read: No such file"),
        ("broken.onnx", "is not a valid ONNX file"),
        ("other.onnx", "was trained with other observation or action spaces"),
    ],
)
def test_unusable_fixed_player_is_refused_before_start(
    source: str, message: str, chase: MakeConfig, ended_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ended_run.folder.path, tmp_path / "runs" / "a")
    monkeypatch.chdir(tmp_path)
    Path("broken.onnx").write_bytes(b"none")
    Path("other.onnx").write_bytes(onnx_file("{}"))
    config = chase({"fixed": {"one": source}})
    with pytest.raises(ConfigError, match=message) as caught:
        with_fixed_players(config, describe_environment(config))
    assert "\n" not in str(caught.value)


def test_onnx_player_takes_seats_with_recorded_spaces(chase: MakeConfig, tmp_path: Path) -> None:
    path = tmp_path / "own.onnx"
    config = chase({"fixed": {"own": str(path)}})
    description = describe_environment(config)
    path.write_bytes(onnx_file(json.dumps(description.policies["prey"].as_dict())))
    found = with_fixed_players(config, description)[0].league
    assert found is not None
    player = found.fixed["own"]
    assert (player.kind, player.seats, player.sha256) == ("onnx", ("prey",), player_hash(path.read_bytes()))


def onnx_file(spaces: str) -> bytes:
    """A file that returns what it is given, and tells these spaces."""
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in ("obs", "action")]
    graph = helper.make_graph([helper.make_node("Identity", ["obs"], ["action"])], "same", ends[:1], ends[1:])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(made, {"stagecoach.spaces": spaces})
    return bytes(made.SerializeToString())


def test_league_is_shown_by_command_status_and_page(
    chase: MakeConfig, ended_run: Run, tmp_path: Path, stagecoach: Stagecoach, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = played(chase({"fixed": {"dice": "random"}}, evaluation={"episodes": 1}), "cats")
    found = stagecoach("league", "cats", "--json").json()
    rows = {row["player"]: row for row in found["players"]}
    assert {"hunter", "prey"} <= rows.keys()
    assert {row["kind"] for row in rows.values()} <= {"current", "snapshot", "fixed"}
    assert found["payoff"]
    printed = stagecoach("league", "cats").ok()
    assert "hunter" in printed and "win rates of hunter and their 95 % intervals" in printed
    assert "rating" in stagecoach("status", "cats").ok()
    entries = run.checkpoints()
    rated = [row for row in entries if row["evaluation"]]
    rated[-1]["evaluation"].pop("confirmation", None)  # a rating needs none
    monkeypatch.setattr(Run, "checkpoints", lambda handle: entries)
    listed = stagecoach("checkpoints", "cats").ok()
    assert all(figure(row["evaluation"]["ranking"]) in line_of(listed, row["name"]) for row in rated)
    shutil.copytree(ended_run.folder.path, tmp_path / "runs" / "a")
    compared = stagecoach("study", "cats", "a").ok()
    cells = [line.split() for line in compared.splitlines() if "reached" in line]
    ratings = [figure(rows[player]["rating"]) for player in ("hunter", "prey")]
    assert [(row[0], row[-2:]) for row in cells] == [("cats", ratings), ("a", ["–", "–"])]
    snapshot = next(row["player"] for row in found["players"] if row["kind"] == "snapshot" and row["seat"] == "prey")
    games = [
        stagecoach("match", name, "random", "--games", "4", *more, "--json").json()
        for name in (f"cats#{snapshot}", f"{run.folder.path}#{snapshot[:-3]}")
        for more in ((), ("--greedy",))
    ]
    assert games[0] | {"first": ""} == games[2] | {"first": ""} and games[0]["games"] == 4, (
        "of the one side that it has"
    )
    assert games[1] | {"first": ""} == games[3] | {"first": ""}
    (path,) = run.config.runs_dir.glob("cats/s3/*/cats")
    assert load_policy(path, snapshot).version == load_policy(run.folder.path, snapshot[:-3]).version
    assert sum(row["kind"] == "snapshot" and row["seat"] == "prey" for row in found["players"]) > 1
    (mine,) = (path / SHARED_OBJECTS).glob(f"{snapshot.rpartition('-')[2]}*")
    kept = mine.read_bytes()
    mine.write_bytes(next(file for file in (path / SHARED_OBJECTS).iterdir() if file != mine).read_bytes())
    with pytest.raises(CheckpointDamaged, match=f"{mine.name} was altered"):
        load_policy(path, snapshot)
    mine.write_bytes(kept)
    assert "may_repeat" in games[0] and "a game may repeat" not in stagecoach("match", "cats#hunter", "random").out
    sure = stagecoach(
        "match", "cats#hunter", "tests.support.environments.games:takes_one", "--games", "2", "--greedy"
    ).ok()
    assert "neither player draws its actions: a game may repeat another one" in sure
    raising = stagecoach("match", f"cats#{snapshot}", "tests.support.environments.games:raises", "--games", "4").ok()
    assert ", 4 forfeits of tests.support.environments.games:raises; win rate 100.0%" in raising
    check_refused(stagecoach("match", "cats#prey-", "random"), "matches prey-", snapshot)
    with pytest.raises(CheckpointNotFound, match="'prey-' matches prey-"):
        load_policy(path, "prey-")
    check_refused(stagecoach("match", "cats#hunter", "dogs"), "no run 'dogs'", "; a scripted player is module:function")
    other = f"hunter-{snapshot.rpartition('-')[2]}"
    check_refused(stagecoach("match", f"cats#{other}", "random"), f"has no policy '{other}'; choose one: cats#hunter")
    with pytest.raises(CheckpointNotFound, match=f"no policy '{other}'"):
        load_policy(path, other)
    mean = stagecoach("match", f"{run.folder.path}#prey-mean", "random", "--games", "4", "--greedy", "--json").json()
    assert (mean["games"], mean["may_repeat"]) == (4, False)
    check_refused(
        stagecoach("match", "cats#mean", "random"), "several policies have snapshots", "hunter-mean, prey-mean"
    )
    wrong = stagecoach("match", "cats#nobody", "random")
    check_refused(wrong, "has no policy 'nobody'; choose one: cats#hunter or #prey, or a snapshot that `stagecoach")
    check_refused(stagecoach("league", "a"), "run 'a' has no league", "docs/guides/league.md")
    with serve(run.config.runs_dir, None) as url:
        with urllib.request.urlopen(f"{url}/api/runs/cats/league") as reply:
            assert json.load(reply) == found
        with pytest.raises(HTTPError) as caught:
            urllib.request.urlopen(f"{url}/api/runs/a/league")
        assert caught.value.code == 400
        assert b"has no league" in caught.value.read()


def test_player_of_live_run_stays_as_resolved(chase: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """`latest` is another one by the time the services are up."""
    first = played(chase({}), "first").checkpoint_store()
    pointer, coordinator = first.pointer(), Coordinator
    assert pointer is not None
    found = first.load(pointer.latest).objects["hunter/policy.safetensors"]

    def moved(*arguments: Any) -> Any:
        older = first.names()[0]
        assert older != pointer.latest
        first.write_pointer(Pointer(latest=older, epoch=pointer.epoch, manifest_sha256=digest(first, older)))
        assert first.resolve("latest") == older
        return coordinator(*arguments)

    monkeypatch.setattr(launcher, "Coordinator", moved)
    run = played(chase({"fixed": {"rival": "first/latest#hunter"}}), "second")
    assert run.config.league is not None
    assert run.config.league.fixed["rival"].sha256 == player_hash(found)
    assert read_shared_object(run.checkpoint_store().store, player_hash(found)) == found


def digest(checkpoints: CheckpointStore, name: str) -> str:
    return hashlib.sha256(checkpoints.read_manifest(name)[0]).hexdigest()


def test_matrix_contains_unrated_opponents() -> None:
    """As the one player of three sides' other two is."""
    cell = {"games": 9, "wins": 6, "draws": 0, "rate": 0.67, "low": 0.3, "high": 0.9, "mean_return": 0.3}
    made = _matrix({"players": [{"player": "main", "kind": "current"}]}, {"main": {"random": cell}}, "")
    assert [column.header for column in made.columns] == ["wins against", "random"] and made.row_count == 1


@pytest.mark.parametrize(
    ("step", "or_resume"),
    some_quick(
        [("prepare_new", True), ("forked", True), ("store_players", False), ("dump_config", False),
         ("create_flow", True)],
        ("dump_config", False),
    ),
)  # fmt: skip
def test_run_killed_during_preparation_continues_identically(
    chase: MakeConfig, monkeypatch: pytest.MonkeyPatch, step: str, or_resume: bool
) -> None:
    """At any step, with weights and a player of another run."""
    played(chase({}), "first")
    league = {"fixed": {"rival": "first/latest#hunter"}, "opponents": {"latest": 0.5, "past": 0, "fixed": 0.5}}
    config = chase(league, initialize_from="first/latest")
    undisturbed = played(config, "undisturbed")

    def kill(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "remove", RunFolder.unlock)  # a killed process removes nothing
        patched.setattr(launcher if step == "prepare_new" else preparation, step, kill)
        with pytest.raises(Killed):
            Run.start(config, "killed", inline=True)
    if or_resume:
        run = Run.start(config, "killed", inline=True, or_resume=True)
    else:
        run = Run.resume("killed", config.runs_dir, inline=True)
    assert run.wait(120).reason == "exhausted"
    assert table_of(run) == table_of(undisturbed)
    stores = [its.checkpoint_store() for its in (run, undisturbed)]
    hunters = [store.load(store.resolve("latest")).objects["hunter/policy.safetensors"] for store in stores]
    assert hunters[0] == hunters[1]


def test_run_without_its_store_is_refused(chase: MakeConfig) -> None:
    run = played(chase({}), "lost")
    for name in ("s3", "redis"):
        shutil.rmtree(run.folder.path / name)
    outcome = Run.resume("lost", run.config.runs_dir, overrides=("stop_at.updates=4",), inline=True).wait(60)
    assert outcome.reason == "failed: the store has no run 'lost' (environment.json is missing)"
