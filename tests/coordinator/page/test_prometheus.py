"""What Prometheus scrapes, its alerts, and the Grafana dashboard; a real Prometheus scrapes a live run."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy.make_dashboard import dashboard, targets
from stagecoach.coordinator.page.panels import PANELS
from stagecoach.coordinator.page.prometheus import METRICS, exposition
from stagecoach.coordinator.page.server import STATIC, serve
from stagecoach.coordinator.page.totals import MOST_NAMES, Spent, Totals
from stagecoach.coordinator.page.view import RunView
from stagecoach.coordinator.run_access.run import Run
from stagecoach.shared.base.errors import DropReason
from stagecoach.shared.config.schema.section import leaves
from stagecoach.shared.protocol.heartbeat import Wait, poll
from tests.conftest import minimal_config
from tests.support.environments.small import CHASE
from tests.support.processes.command_line import until
from tests.support.suite.speed import stretched

MakeConfig = Callable[..., Any]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="no prometheus and promtool (Debian's package prometheus)",
)


def parsed(*views: RunView) -> Samples:
    """Each sample once, of metrics that are described as they are written."""
    families = list(text_string_to_metric_families(exposition(views).decode()))
    assert {family.name for family in families} == {name.removesuffix("_total") for name in METRICS}
    samples = [sample for family in families for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def value(samples: Samples, name: str, run: str, /, **labels: str) -> float:
    return samples[f"stagecoach_{name}", frozenset({"run": run, **labels}.items())]


def test_metrics_equal_status_of_ended_and_live_run(ended_run: Run, config: MakeConfig) -> None:
    rollout = {"workers": 2, "fragments_per_update": 4, "max_policy_lag": 2}
    run = Run.start(config(stop_at={"updates": 10**6}, rollout=rollout), "b", inline=True)
    until(run, lambda status: status.updates > 3 and status.evaluation is not None)
    views = [RunView(ended_run), RunView(run)]
    for view in views:
        view.refresh()
        assert not view.banner
    found = parsed(*views)
    for name, view in zip("ab", views, strict=True):
        state = view.state
        for count in ("env_steps", "episodes", "updates"):
            assert value(found, f"{count}_total", name) == state[count] > 0
        total = state["ledger"]["total"]
        assert value(found, "transitions_total", name, role="worker") == total["produced"]["transitions"]
        assert value(found, "transitions_total", name, role="trainer") == total["consumed"]["transitions"]
        assert sum(value(found, "dropped_transitions_total", name, reason=reason) for reason in DropReason) == sum(
            count["transitions"] for count in total["dropped"].values()
        )
        assert value(found, "ledger_unbalanced", name) == 0
        assert value(found, "evaluation_return", name) == state["evaluation"]["mean_return"]
        about = {"state": state["state"], "algorithm": "ppo", "environment": "CartPole-v1"}
        assert value(found, "run_info", name, **about) == 1
    live = views[1].state
    assert live["state"] == "running"
    assert value(found, "workers", "b") == value(found, "workers_wanted", "b") == 2
    assert value(found, "log_bytes", "b") == live["log"]["bytes"] <= value(found, "log_max_bytes", "b")
    assert value(found, "fragments_in_flight", "b") == live["flow"]["in_flight"]
    assert value(found, "fragments_window", "b") == 12
    assert value(found, "policy_lag_bound_versions", "b") == 2
    assert value(found, "store_away", "b") == value(found, "redis_away", "b") == 0
    assert 0 <= value(found, "heartbeat_age_seconds", "b", role="worker") < 10
    name = "rollout/ep_rew_mean"
    assert value(found, "training_metric", "b", name=name, of="") == live["metrics"][name]
    trainer = next(beat for beat in live["roles"] if beat["role"] == "trainer")
    for stage, seconds in trainer["stages"].items():
        assert value(found, "stage_seconds_total", "b", role="trainer", stage=stage) == seconds
    for wait, seconds in trainer["waited"].items():
        assert value(found, "wait_seconds_total", "b", role="trainer", **{"for": wait}) == seconds
    *_, fragments, versions = trainer["progress"]["lags"]
    assert value(found, "policy_lag_versions_count", "b") == fragments > 0
    assert value(found, "policy_lag_versions_sum", "b") == versions
    assert value(found, "policy_lag_versions_bucket", "b", le="2.0") == fragments
    assert not {"workers", "heartbeat_age_seconds", "redis_away"} & {
        found_name.removeprefix("stagecoach_") for found_name, labels in found if ("run", "a") in labels
    }, "a run that has ended has none"
    run.stop()
    assert run.wait(120).reason == "stopped"
    views[1].refresh()
    after = parsed(*views)
    for (sample, labels), before in found.items():
        if sample.endswith(("_total", "_count", "_sum", "_bucket")):
            assert after[sample, labels] >= before, sample


def beat(role: str, id_: str, process: str, stages: Mapping[str, float], **more: Any) -> dict[str, Any]:
    return {"role": role, "id": id_, "process": process, "stages": stages, "waited": {}, "progress": {}} | more


def test_counters_never_fall_while_processes_are_replaced() -> None:
    totals = Totals()
    act, rest = Spent("stages", "worker", "act"), Spent("stages", "worker", "other")
    waited = Spent("waited", "worker", "credit")

    def see(*beats: dict[str, Any]) -> tuple[float, float]:
        totals.add({"roles": list(beats)})
        return totals.spent[act], totals.spent[waited]

    def worker(id_: str, process: str, acted: float, wait: float, incarnation: int = 0) -> dict[str, Any]:
        progress = {"incarnation": incarnation}
        stages = {"act": acted, "other": acted}
        return beat("worker", id_, process, stages, waited={"credit": wait}, progress=progress)

    assert see(worker("worker-0", "1", 10, 4), worker("worker-1", "2", 20, 1)) == (30, 5)
    assert see(worker("worker-0", "1", 12, 3), worker("worker-1", "2", 20, 1)) == (32, 5), "within another wait"
    assert see(worker("worker-0", "3", 1, 0, 1), worker("worker-1", "2", 21, 1)) == (34, 5), "another process"
    assert see(worker("worker-0", "3", 2, 0, 1)) == (35, 5), "one was taken away"
    assert see() == (35, 5), "Redis is away"
    assert see(worker("worker-0", "3", 3, 1, 1), worker("worker-1", "2", 22, 1)) == (37, 6), "and back"
    assert see(worker("worker-0", "3", 1, 1, 2), worker("worker-1", "2", 22, 1)) == (38, 7), "anew in one process"
    assert see(worker("worker-0", "3", 30, 1, 2), worker("worker-1", "2", 22, 1)) == (67, 7)
    assert totals.spent[rest] == 67
    assert sum(value for key, value in totals.highest.items() if key[0] == "incarnation") == 2


def test_counters_stand_still_while_trainer_rereads() -> None:
    totals, total = Totals(), {"produced": {"transitions": 64}, "consumed": {"transitions": 32}}
    lags = [1, 2, 2, 2, 2, 2, 2, 2, 2, 1]
    trainer = beat("trainer", "trainer", "1", {}, progress={"lags": lags})
    totals.add({"env_steps": 320, "roles": [trainer], "ledger": {"total": total}})
    before = totals.highest
    for progress in ({}, {"lags": [0] * 10}, {"lags": "many"}, {"lags": [1]}, {"lags": ["x"] * 10}):
        totals.add({"env_steps": 64, "roles": [trainer | {"progress": progress}], "ledger": {}})
        assert totals.highest == before | {key: 0 for key in totals.highest if key not in before}
    assert before["env_steps",] == 320 and before["consumed",] == 32 and before["lags", "8"] == 2


def test_labels_are_bounded_whatever_heartbeats_hold() -> None:
    totals = Totals()
    for process in range(3):
        stages = {f"stage {process} {number}": 1.0 for number in range(100)}
        totals.add({"roles": [beat("worker", "worker-0", str(process), stages), beat("x", "x", "1", {"a": -1.0})]})
    names = [key.name for key in totals.spent if key.role == "worker"]
    assert len(names) == MOST_NAMES + 1 and "other" in names
    assert sum(seconds for key, seconds in totals.spent.items() if key.role == "worker") == 300
    assert {key.role for key in totals.spent} == {"worker", "other"}


def test_metrics_report_outages(ended_run: Run) -> None:
    view = RunView(ended_run)
    view.refresh()
    waits = {"ended": None, "alive": True, "age_seconds": 1.0, "outage": True, "waiting_for": "the store"}
    base: dict[str, Any] = copy.deepcopy(view.state) | {"live": True, "state": "running"}
    cases: dict[str, tuple[dict[str, Any], tuple[float, float]]] = {
        "nothing": ({}, (0, 0)),
        "uploads wait": ({"store": {"waiting_for": "the store"}}, (1, 0)),
        "a role waits for the store": ({"roles": [beat("worker", "w", "1", {}, **waits)]}, (1, 0)),
        "a role waits for a shard": (
            {"roles": [beat("worker", "w", "1", {}, **waits | {"waiting_for": "a Redis shard"})]}, (0, 1),
        ),
        "one that ended does not": ({"roles": [beat("worker", "w", "1", {}, **waits | {"ended": "stopped"})]}, (0, 0)),
        "the run is paused": ({"state": "paused"}, (0, 1)),
    }  # fmt: skip
    for changes, expected in cases.values():
        view.state = base | changes
        found = parsed(view)
        assert (value(found, "store_away", "a"), value(found, "redis_away", "a")) == expected
    view.state, view.away = base, "Redis"
    assert value(parsed(view), "redis_away", "a") == 1
    view.state["ledger"]["total"]["balances"] = False
    assert value(parsed(view), "ledger_unbalanced", "a") == 1


def test_metrics_of_policies_are_labeled(ended_run: Run) -> None:
    view = RunView(ended_run)
    view.refresh()
    view.state["metrics"] |= {
        "train/entropy/wolf": 0.5, "league/rating/wolf": 20.0, "league/elo/wolf": 1200.0, "curriculum/lesson/wall": 1.0,
    }  # fmt: skip
    found = parsed(view)
    assert value(found, "training_metric", "a", name="train/entropy", of="wolf") == 0.5
    assert value(found, "training_metric", "a", name="league/rating", of="wolf") == 20.0
    assert value(found, "training_metric", "a", name="curriculum/lesson", of="wall") == 1.0
    assert value(found, "training_metric", "a", name="train/entropy", of="") == view.state["metrics"]["train/entropy"]
    assert "league/elo" not in str(found), "it is not drawn"


def test_empty_view_is_not_an_error(ended_run: Run) -> None:
    found = parsed(RunView(ended_run))
    assert {name for name, _ in found} == {"stagecoach_build_info", "stagecoach_run_info"}
    assert {name for name, _ in parsed()} == {"stagecoach_build_info"}


def test_metrics_name_algorithms_without_importing_user_code(ended_run: Run) -> None:
    policies = {"wolf": {"algorithm": {"name": "dqn"}}, "sheep": {"algorithm": {"name": "not.here:Own"}}}
    config = minimal_config(environment=CHASE, policies=policies, agents={"cat": "wolf", "mouse": "sheep"})
    found = parsed(RunView(Run(ended_run.folder, config)))
    about = {"state": "unknown", "algorithm": "dqn, not.here:Own", "environment": config.environment.id}
    assert value(found, "run_info", "a", **about) == 1


# Prometheus itself


@needs_prometheus
def test_promtool_accepts_names_rules_and_config(ended_run: Run, tmp_path: Path) -> None:
    view = RunView(ended_run)
    view.refresh()
    promtool("check", "metrics", given=exposition([view]))
    for path in PROMETHEUS.iterdir():
        shutil.copy(path, tmp_path)
    (tmp_path / "stagecoach.token").write_text("secret")
    promtool("check", "config", "--lint=all", "--lint-fatal", str(tmp_path / "prometheus.yml"))
    promtool("check", "rules", "--lint=all", "--lint-fatal", str(tmp_path / "alerts.yml"))
    promtool("test", "rules", str(PROMETHEUS / "alerts_test.yml"))


def promtool(*arguments: str, given: bytes = b"") -> None:
    done = subprocess.run(["promtool", *arguments], input=given, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b""), (done.stdout + done.stderr).decode()


def test_alerts_use_existing_metrics_and_fire() -> None:
    text = (PROMETHEUS / "alerts.yml").read_text()
    known = {*METRICS, *(f"stagecoach_policy_lag_versions_{part}" for part in ("sum", "count"))}
    assert set(re.findall(r"stagecoach_\w+", text)) <= known
    rules = {rule["alert"] for rule in yaml.safe_load(text)["groups"][0]["rules"]}
    tries = [
        each for test in yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
        for each in test["alert_rule_test"]
    ]  # fmt: skip
    assert {each["alertname"] for each in tries if each.get("exp_alerts")} == rules
    assert {each["alertname"] for each in tries if not each.get("exp_alerts")} == rules


EMPTY_FOR_PPO_ON_CARTPOLE = {
    "league/rating", "curriculum/lesson", "rollout/success_rate", "train/update_kl", "train/value_mean",
    "train/q_value", "train/temperature", "train/critic_loss",
}  # fmt: skip
"""Metrics of other algorithms, of leagues and lessons, or of environments that tell whether an episode succeeds."""

GATEWAYS = ["stagecoach_gateway_sessions", "stagecoach_gateway_round_trip_seconds"]


@needs_prometheus
@pytest.mark.processes
@pytest.mark.timeout(240)
def test_prometheus_scrapes_live_run_and_queries_return_data(config: MakeConfig, tmp_path: Path) -> None:
    run = Run.start(config(stop_at={"updates": 10**6}, rollout={"workers": 2, "max_policy_lag": 2}), "b", inline=True)
    with serve(run.config.runs_dir, "secret") as url, prometheus(url, "secret", tmp_path) as query:
        until(run, lambda status: status.updates > 3 and status.evaluation is not None)
        by_panel = {panel.id: [each for _, each in targets(panel)] for panel in PANELS}
        every = {each for queries in by_panel.values() for each in queries}
        without = [f'"{name}"' for name in EMPTY_FOR_PPO_ON_CARTPOLE] + GATEWAYS
        expected = {each for each in every if any(name in each for name in without)}
        assert len(every) > 30 and len(expected) == len(without)
        wait = Wait("data of every query", stretched(90))
        poll(wait, lambda: {each for each in every if not query(each)} == expected, 1.0)
        assert sum(query(by_panel["waits-workers"][0])) == pytest.approx(1)
        assert all(speed > 0 for each in by_panel["speed"] for speed in query(each))
        assert query('up{job="stagecoach"}') == [1]
        assert query("stagecoach_workers") == [2]
        run.stop()
        assert run.wait(120).reason == "stopped"


@contextmanager
def prometheus(url: str, token: str, folder: Path) -> Iterator[Callable[[str], list[float]]]:
    """Scrapes `url` each second as the example config says; a function that gives the values of a query now."""
    written = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    written["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    written["scrape_configs"][0]["static_configs"] = [{"targets": [urllib.parse.urlsplit(url).netloc]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(written))
    shutil.copy(PROMETHEUS / "alerts.yml", folder)
    (folder / "stagecoach.token").write_text(token)
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    log = (folder / "prometheus.log").open("wb")
    process = subprocess.Popen(
        ["prometheus", "--config.file=prometheus.yml", f"--storage.tsdb.path={folder / 'series'}",
         f"--web.listen-address=127.0.0.1:{port}"],
        cwd=folder, stdout=log, stderr=log,
    )  # fmt: skip

    def query(text: str) -> list[float]:
        filled = text.replace("$run", "b").replace("$__rate_interval", "10s")
        asked = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': filled})}"
        with urllib.request.urlopen(asked, timeout=10) as response:
            values = [float(series["value"][1]) for series in json.load(response)["data"]["result"]]
        return [value for value in values if not math.isnan(value)]

    def ready() -> bool:
        try:
            return query("vector(1)") == [1.0]
        except OSError:
            return False

    try:
        poll(Wait("Prometheus", stretched(60)), ready, 0.2)
        yield query
    finally:
        process.terminate()
        process.wait(30)
        log.close()


# Grafana


def test_bounds_of_ended_runs_are_config_fields() -> None:
    """A live run reports its bounds; for an ended run the page reads these fields of the config."""
    table = (STATIC / "run.js").read_text().partition("const CONFIGURED = ")[2].partition(";")[0]
    found = dict(re.findall(r'"([\w.]+)": "([\w.]+)"', table))
    assert set(found) == {panel.bound for panel in PANELS if panel.bound}
    assert set(found.values()) <= leaves(minimal_config().model_dump(mode="json")).keys()


def test_dashboard_matches_panels() -> None:
    written = json.loads((ROOT / "deploy" / "grafana" / "stagecoach.json").read_text())
    assert written == dashboard(), "python deploy/make_dashboard.py > deploy/grafana/stagecoach.json"
    panels = written["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    charts = [panel for panel in panels if panel["type"] == "timeseries"]
    drawn = [(target["legendFormat"], target["expr"]) for panel in charts for target in panel["targets"]]
    assert drawn == [target for panel in PANELS for target in targets(panel)]
    queries = [query for _, query in drawn]
    assert all(line.query in queries for panel in PANELS for line in panel.lines if line.query)
    for panel in charts:
        assert panel["datasource"]["uid"] == "${datasource}" and panel["targets"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    assert [variable["name"] for variable in written["templating"]["list"]] == ["datasource", "run"]
    known = {*METRICS, "stagecoach_policy_lag_versions_bucket"}
    assert set(re.findall(r"stagecoach_\w+", json.dumps(queries))) <= known
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)), "panels overlap"
    assert max(x for x, _ in cells) < 24


def test_monitoring_docs_name_every_metric_and_alert() -> None:
    text = (ROOT / "docs/operations/monitoring.md").read_text()
    rows = dict(re.findall(r"^\| `(stagecoach_\w+)` \| ([^|]*) \|", text, re.MULTILINE))
    said = {name: tuple(re.findall(r"`(\w+)`", labels)) for name, labels in rows.items()}
    assert said == {name: described.labels for name, described in METRICS.items()}
    rules = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"][0]["rules"]
    assert set(re.findall(r"^\| `(Stagecoach\w+)` \|", text, re.MULTILINE)) == {rule["alert"] for rule in rules}
