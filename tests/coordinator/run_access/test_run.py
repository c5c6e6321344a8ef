"""`Run` as programs use it: events to the end, polling through the end, the best checkpoint, the page, orders."""

from __future__ import annotations

import http.cookiejar
import os
import signal
import textwrap
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from stagecoach.coordinator.run_access.run import Run
from stagecoach.shared.base.errors import CheckpointNotFound
from stagecoach.shared.config.loading import dump_config
from stagecoach.shared.protocol import events
from stagecoach.shared.protocol.events import Event
from stagecoach.shared.protocol.heartbeat import Wait, poll
from tests.support.processes.command_line import until

MakeConfig = Callable[..., Any]
FOR_EVER = {"updates": 10**6}
HOW = [pytest.param(True, id="inline"), pytest.param(False, id="ray", marks=pytest.mark.ray)]
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("no_run_left")]


class Following:
    """Collects a run's events in a thread of its own."""

    def __init__(self, run: Run) -> None:
        self.events: list[Event] = []
        self.error: BaseException | None = None
        self._run = run
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            for event in self._run:
                self.events.append(event)
        except BaseException as error:
            self.error = error

    def to_the_end(self) -> list[Event]:
        self._thread.join(120)
        assert not self._thread.is_alive() and self.error is None, self.error
        return self.events


@pytest.mark.parametrize("inline", HOW)
def test_iterating_yields_each_event_once_to_the_end(config: MakeConfig, inline: bool) -> None:
    run = Run.start(config(checkpoint={"every": "1 updates"}), "a", inline=inline)
    attached = Run.attach("a", run.config.runs_dir)
    following = [Following(run), Following(attached), Following(attached), Following(run)]
    found = list(run)
    assert run.ended and run.wait().reason == "exhausted"
    assert all(each.to_the_end() == found for each in following)
    assert list(Run.attach("a", run.config.runs_dir)) == found == run.events()
    assert [event.id for event in found] == sorted({event.id for event in found}, key=lambda id_: id_.split("-"))
    said = [event.text for event in found if event.kind == "state"]
    assert said == ["run finished: reached stop_at"]
    assert any("worker-0 ended" in event.text for event in found), "what comes after the trainer's last record"
    scores = {event.checkpoint: event for event in found if event.score is not None}
    if inline:  # with Ray the run may be over before its evaluator has started
        last = scores["4_Step-256.ckpt"]
        assert (last.kind, last.version, last.env_steps) == ("evaluation", 4, 256) and last.data["episodes"] == 1
    written = [event.env_steps for event in found if event.kind == "checkpoint"]
    assert written == sorted(written, key=lambda steps: steps or 0) and written[-1] == 256


def test_iterating_continues_while_redis_restarts(config: MakeConfig) -> None:
    run = Run.start(config(stop_at=FOR_EVER), "a", inline=True)
    following = [Following(run), Following(Run.attach("a", run.config.runs_dir))]
    until(run, lambda status: status.version >= 1)
    client = run.client
    assert client is not None
    os.kill(int(client.info("server")["process_id"]), signal.SIGKILL)
    again = "was restarted over its data"

    def restarted() -> bool:
        assert run.status(accounting=False).live, "its coordinator is at work"
        return any(again in event.text for event in run.events())

    poll(Wait("Redis to be restarted", 60), restarted)
    run.note("after the restart")
    run.stop()
    assert run.wait(60).reason == "stopped"
    for each in following:
        texts = [event.text for event in each.to_the_end()]
        assert each.events == run.events() and {"after the restart", "run finished: stopped"} <= {*texts}
        assert sum(again in text for text in texts) == 1


def test_iterating_reads_what_redis_dropped_from_the_store(config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_KEPT", 200)
    run = Run.start(config(stop_at=FOR_EVER, checkpoint={"every": "100000 updates"}), "a", inline=True)
    slow = iter(run)
    found = [next(slow)]
    for part in range(5):
        for number in range(90):
            run.note(f"note {part} {number}")
        latest = run.checkpoints()[-1]["version"]
        until(run, lambda status, latest=latest: status.version > latest)  # type: ignore[misc]
        run.checkpoint()  # with which the trainer records them
        poll(Wait("a checkpoint", 60), lambda latest=latest: run.checkpoints()[-1]["version"] > latest)  # type: ignore[misc]
    client = run.client
    assert client is not None and len(events.read_events(client, "a")) < 450, "Redis has dropped some"
    run.stop()
    found += slow
    notes = [event.text for event in found if event.kind == "note"]
    assert notes == [f"note {part} {number}" for part in range(5) for number in range(90)]


@pytest.mark.parametrize("inline", HOW)
def test_polling_to_the_end_raises_nothing(config: MakeConfig, inline: bool) -> None:
    """Services stop between any two calls; two threads share a handle, a third has its own."""
    calls: dict[str, Callable[[Run], object]] = {
        "metrics": lambda run: [len(rows) for rows in run.metrics()],
        "evaluations": lambda run: list(run.metrics("evaluations")),
        "last_metrics": Run.last_metrics,
        "ended": lambda run: run.ended,
        "status": Run.status,
        "live": lambda run: run.live,
        "checkpoints": Run.checkpoints,
        "events": Run.events,
        "best": lambda run: run.best,
        "repr": lambda run: (repr(run), run._repr_html_()),
    }
    for name in "abc" if inline else "a":
        run = Run.start(config(policy_versions={"transport": "object_store"}), name, inline=inline)
        attached = Run.attach(name, run.config.runs_dir)
        over, errors, counted = threading.Event(), [], dict.fromkeys(calls, 0)

        def hammer(handle: Run) -> None:
            last = False
            while not last:
                last = over.is_set()  # noqa: B023
                for what, call in calls.items():
                    try:
                        call(handle)
                        counted[what] += 1  # noqa: B023
                    except BaseException as error:
                        errors.append((what, error))  # noqa: B023

        threads = [threading.Thread(target=hammer, args=(handle,)) for handle in (run, run, attached)]
        for thread in threads:
            thread.start()
        assert run.wait(120).reason == "exhausted"
        over.set()
        for thread in threads:
            thread.join(60)
        assert errors == [] and all(counted.values())
        versions = [row["policy/version"] for rows in run.metrics() for _, row in rows.named()]
        assert versions == [1.0, 2.0, 3.0, 4.0] and run.status().state == "finished"


def test_policy_is_named_by_mark_checkpoint_or_policy(config: MakeConfig) -> None:
    run = Run.start(config(evaluation={"episodes": 0}, stop_at=FOR_EVER), "a", inline=True)
    with pytest.raises(CheckpointNotFound, match=r"run a has no (best )?checkpoint"):
        run.policy("best")
    until(run, lambda status: status.version >= 2)
    run.stop()
    run.wait(60)
    run.stop()  # too late, which a program cannot know
    name = run.promote(run.checkpoints()[0]["name"])
    assert run.policy().version == run.policy("promoted").version == run.policy(name).version
    assert run.policy("latest").version == run.policy("final").version == run.status().version
    observation, _ = gym.make("CartPole-v1").reset(seed=1)
    assert run.policy("final").act(observation) in (0, 1)
    assert run.best is None


def test_best_example_compares_learning_rates(
    config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(dump_config(config()))
    lines = str(Run.best.__doc__).split("learning rates:")[1]
    names: dict[str, Any] = {}
    exec("from stagecoach import Run, load_config\n" + textwrap.dedent(lines), names)
    assert capsys.readouterr().out.split() == [str(max(names["scores"], key=names["scores"].get))]
    best = names["run"].best
    entry = next(entry for entry in names["run"].checkpoints() if "best" in entry["marks"])
    assert (best.name, best.env_steps) == (entry["name"], entry["env_steps"])
    assert best.score == entry["evaluation"]["confirmation"]["mean_return"] and Path(best.location).is_dir()


def test_page_is_served_until_the_handle_ends(ended_run: Run) -> None:
    run = Run.attach("a", ended_run.config.runs_dir)
    page = run.page()
    assert page == run.page() and page._repr_html_().startswith(f'<a href="{page}"')
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
    with browser.open(page) as answer:
        assert answer.status == 200 and b"<!doctype html>" in answer.read().lower()
    del run
    with pytest.raises(urllib.error.URLError, match="refused"):
        browser.open(page)


CALLBACKS = """
import sys, time
from stagecoach import Callback

class Steers(Callback):
    def on_update(self, row, env_steps):
        if env_steps == 128:
            self.run.checkpoint()
    def on_checkpoint(self, name, env_steps):
        self.run.promote(name)
        if env_steps >= 192:
            self.run.stop()

class Raises(Callback):
    def on_update(self, row, env_steps):
        sys.exit("no more")
    def on_checkpoint(self, name, env_steps):
        self.run.promote("9999_Step-1.ckpt")

class Blocks(Callback):
    def on_update(self, row, env_steps):
        time.sleep(1)
"""


@pytest.mark.parametrize("who", ["Steers", "Raises", "Blocks", "program"])
def test_orders_do_not_change_what_is_learned(
    config: MakeConfig, who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a callback or by a program that follows the run; up to the stop all versions are the same bytes."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "steering.py").write_text(CALLBACKS)
    common = {"rollout": {"max_policy_lag": 0}, "policy_versions": {"transport": "object_store"}, "seed": 3,
              "checkpoint": {"every": "1 updates", "keep_last": 99}}  # fmt: skip
    ends = {"stop_at": {"updates": 12}}
    calm = Run.start(config(**common, **ends), "calm", inline=True)
    assert calm.wait(120).reason == "exhausted"
    stops = who in ("Steers", "program")
    writers = {} if who == "program" else {"metrics": {"writers": [f"steering:{who}"], "every": "1 updates"}}
    run = Run.start(config(**common, **writers, stop_at=FOR_EVER if stops else ends["stop_at"]), "run", inline=True)
    for event in run if who == "program" else ():
        if event.kind == "checkpoint" and event.checkpoint is not None:
            run.promote(event.checkpoint)
            run.checkpoint() if event.env_steps == 128 else None
            run.stop() if (event.env_steps or 0) >= 192 else None
    outcome = run.wait(120)
    assert outcome.reason == ("stopped" if stops else "exhausted")

    def learned(of: Run) -> dict[int, str]:
        entries = {entry["version"]: of.checkpoint_store().manifest(entry["name"]) for entry in of.checkpoints()}
        return {version: its.objects["default/policy.safetensors"].sha256 for version, its in entries.items()}

    expected, found = learned(calm), learned(run)
    shared = expected.keys() & found.keys()
    assert len(shared) >= 4 and {version: found[version] for version in shared} == {
        version: expected[version] for version in shared
    }
    if stops:
        assert run.policy("promoted").version > 0
    if who == "Raises":
        told = [event.text for event in run.events() if event.kind == "metrics"]
        assert len(told) == 1 and "training continues" in told[0]
