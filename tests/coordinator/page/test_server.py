"""The page's server as a browser and the command line see it: who may enter, every route, and orders that act."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stagecoach.coordinator.catalog.status import Status
from stagecoach.coordinator.page import access, server, view
from stagecoach.coordinator.page.server import serve
from stagecoach.coordinator.page.view import RunView
from stagecoach.coordinator.run_access.run import Run
from stagecoach.shared.base.errors import UserError
from tests.conftest import minimal_config
from tests.support.processes.command_line import CommandLine, Stagecoach, check_refused, until
from tests.support.processes.page import TOKEN, Reply, Visitor, live_run, soon
from tests.support.services.fault_proxy import FaultProxy

ORDERS = ("stop", "checkpoint", "scale", "promote", "note")
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def static(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of the page that tell which one they are."""
    folder = tmp_path / "static"
    folder.mkdir()
    (folder / "index.html").write_text("<!doctype html>the page")
    (folder / "page.js").write_text("// the script")
    monkeypatch.setattr(server, "STATIC", folder)
    return folder


@pytest.fixture
def page(runs_dir: Path) -> Iterator[Visitor]:
    with serve(runs_dir, TOKEN) as url:
        yield Visitor(url)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run at work, `live`, in a thread of this process; tests leave it so."""
    sections: dict[str, Any] = {"evaluation": {"episodes": 1}, "checkpoint": {"every": "100000 updates"}}
    with live_run(tmp_path_factory.mktemp("live"), **sections) as run:
        yield run


@pytest.fixture
def live_page(live: Run) -> Iterator[Visitor]:
    with serve(live.config.runs_dir, TOKEN) as url:
        yield Visitor(url)


# Who may enter


@pytest.mark.parametrize(
    "path", ["/", "/runs/a", "/static/page.js", "/api/panels", "/api/runs/a", "/metrics", "/nowhere"]
)
def test_without_the_token_nothing_is_told(page: Visitor, path: str) -> None:
    stranger = page.as_()
    stranger.ask(path).refused(401, "open the URL that `stagecoach page` printed")
    page.as_(Authorization="Bearer another").ask(path).refused(401, "wrong token")
    page.as_(Authorization=f"Basic {TOKEN}").ask(path).refused(401)
    stranger.ask(f"{path}?token=another").refused(401, "wrong token")
    cookie = page.ask(f"{path}?token={TOKEN}").headers["Set-Cookie"].partition("=")[0]
    page.as_(Cookie=f"{cookie}={TOKEN}").ask(path).refused(401)
    for verb in ORDERS:
        stranger.order("a", verb).refused(401)


def test_url_token_sets_cookie_that_is_not_the_token(page: Visitor) -> None:
    entered = page.as_().ask(f"/runs/a?token={TOKEN}")
    assert (entered.status, entered.headers["Location"]) == (303, "/runs/a")
    cookie, *attributes = entered.headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(attributes)
    assert TOKEN not in cookie
    browser = page.as_(Cookie=cookie)
    assert browser.ask("/runs/a").status == 200
    assert browser.ask("/?token=old").headers["Location"] == "/", "an old bookmark of who is inside"
    assert page.as_().ask(f"//elsewhere.example/?token={TOKEN}").headers["Location"] == "/elsewhere.example/"


def test_wrong_tokens_never_lock_out_the_right_one(page: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong bookmark or scraper behind the same address (a proxy, 127.0.0.1) must not close the page to others."""
    browser = page.as_(Cookie=page.ask(f"/?token={TOKEN}").headers["Set-Cookie"].partition(";")[0])
    for number in range(10):
        page.as_(Authorization=f"Bearer {number}").ask("/api/runs").refused(401)
    page.as_(Authorization="Bearer 10").ask("/api/runs").refused(429, "too many wrong tokens")
    assert page.ask("/api/runs").status == 200
    assert page.ask(f"/?token={TOKEN}").status == 303
    page.as_().ask("/api/runs").refused(401)
    assert browser.ask("/api/runs").status == 200
    monkeypatch.setattr(access, "_WINDOW_SECONDS", 0.0)
    page.as_(Authorization="Bearer 10").ask("/api/runs").refused(401)


def test_orders_come_from_the_pages_own_origin(page: Visitor) -> None:
    for origin in ("http://elsewhere.example", "null", page.url + "0"):
        page.ask("/api/runs/a/stop", {}, Origin=origin).refused(403, origin)
    page.ask("/api/runs/a/stop", {}, Origin=page.url).refused(409, "is not live")


@pytest.mark.parametrize("token", [TOKEN, None])
def test_read_only_or_tokenless_page_takes_no_orders(runs_dir: Path, token: str | None) -> None:
    with serve(runs_dir, token, read_only=token is not None) as url:
        visitor = Visitor(url)
        assert visitor.ask("/api/page").json == {"can_order": False}
        assert visitor.ask("/api/runs/a").json["state"]["reason"] == "exhausted"
        for verb in ORDERS:
            visitor.order("a", verb).refused(403, "without a token" if token is None else "(--read-only)")


def test_tokenless_page_refuses_foreign_host_names(runs_dir: Path) -> None:
    with serve(runs_dir, None) as url:
        visitor = Visitor(url, {})
        assert visitor.ask("/api/runs", Host="localhost:1234").status == 200, "by ssh -L"
        for host in ("elsewhere.example", "[", ""):
            visitor.ask("/api/runs", Host=host).refused(403, "only at 127.0.0.1 and localhost")


def test_every_response_says_what_a_browser_may_do_with_it(page: Visitor) -> None:
    for path in ("/", "/static/page.js", "/api/runs", "/nowhere"):
        headers = page.ask(path).headers
        assert "default-src 'self'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == ("no-cache" if path.startswith("/static") else "no-store")


# What it tells


def test_page_serves_its_files(page: Visitor) -> None:
    for path in ("/", "/runs/a", "/runs/nobody"):
        assert b"the page" in page.ask(path).body
        assert page.ask(path).headers["Content-Type"].startswith("text/html")
    assert "javascript" in page.ask("/static/page.js").headers["Content-Type"]
    page.ask("/static/..%2fruns%2fa%2fconfig.yaml").refused(404)


def test_ended_run_is_served_from_store(page: Visitor, runs_dir: Path) -> None:
    shutil.copytree(runs_dir / "a", runs_dir / "broken")
    rows = {row["run_id"]: row for row in page.ask("/api/runs").json}
    assert (rows["a"]["state"], rows["a"]["reason"]) == ("finished", "reached stop_at")
    assert rows["broken"]["state"] == "unreadable", "one that was copied spoils no other"
    snapshot = page.ask("/api/runs/a").json
    assert (snapshot["run_id"], snapshot["banner"], snapshot["state"]["updates"]) == ("a", "", 4)
    assert [entry["version"] for entry in snapshot["checkpoints"]] == [0, 1, 2, 3, 4]
    assert len(snapshot["evaluations"]) == 5
    assert {"return", "ledger"} <= {panel["id"] for panel in page.ask("/api/panels").json}

    series = page.ask("/api/runs/a/series?metric=train/approx_kl&metric=policy/lag*&metric=train/q_value").json
    assert {"train/approx_kl", "policy/lag_mean"} <= series.keys(), "Q is a panel's, which this run has not"
    assert len(series["policy/lag_mean"]["mean"]) == 4
    assert page.ask("/api/runs/a/series?stream=fleet&metric=fleet/fps").status == 200


def test_configs_are_compared(page: Visitor, runs_dir: Path) -> None:
    (runs_dir / "b").mkdir()
    (runs_dir / "b" / "config.yaml").write_text(
        (runs_dir / "a" / "config.yaml").read_text().replace("seed: 1", "seed: 2")
    )
    found = page.ask("/api/runs/a/config").json
    assert found["config"]["environment.id"] == "CartPole-v1"
    assert found["differences"] == {}
    assert page.ask("/api/runs/a/config?against=b").json["differences"] == {"seed": [1, 2]}
    page.ask("/api/runs/a/config?against=c").refused(404, "no run 'c'")


def test_videos_are_those_in_the_runs_folder(page: Visitor, runs_dir: Path) -> None:
    assert page.ask("/api/runs/a/videos").json == []
    (runs_dir / "a" / "videos").mkdir()
    (runs_dir / "a" / "videos" / "best.mp4").write_bytes(b"moving")
    assert [(each["name"], each["bytes"]) for each in page.ask("/api/runs/a/videos").json] == [("best.mp4", 6)]
    assert page.ask("/api/runs/a/videos/best.mp4", Range="bytes=1-3").body == b"ovi"
    for name in ("worst.mp4", "..%2fconfig.yaml", "..%2f..%2fa%2fvideos%2fbest.mp4"):
        page.ask(f"/api/runs/a/videos/{name}").refused(404)


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/nowhere", 404, ()),
        ("/api/runs/aa", 404, ("no run 'aa'", "did you mean a?")),
        ("/api/runs/aa/updates", 404, ("no run 'aa'",)),
        ("/api/runs/aa/videos", 404, ("no run 'aa'",)),
        ("/api/runs/..", 400, ("run id",)),
        ("/api/runs/a/series?metric=train/aprox_kl", 400, ("'train/aprox_kl' in stream train", "train/approx_kl")),
        ("/api/runs/a/explain?version=x", 400, ("expected ?version=NUMBER",)),
        ("/api/runs/a/explain?version=99", 400, ("versions 1 to",)),
        ("/api/runs/a/explain?version=1", 400, ("archive=all",)),
        ("/api/runs/a/series?metric=nothing*", 400, ("unknown metric 'nothing*'",)),
        ("/api/runs/a/series?stream=river&metric=x", 400, ("unknown stream 'river'; expected one of train, fleet",)),
        ("/api/runs/a/series", 400, ("no metric requested",)),
        ("/api/runs/a/stop", 405, ()),
    ],
)  # fmt: skip
def test_missing_things_are_one_line(page: Visitor, path: str, status: int, words: tuple[str, ...]) -> None:
    page.ask(path).refused(status, *words)


def test_ended_run_takes_only_promotion(page: Visitor) -> None:
    for verb, order in (("stop", {}), ("checkpoint", {}), ("scale", {"workers": 2}), ("note", {"text": "hello"})):
        page.order("a", verb, order).refused(409, "run 'a' is not live")
        page.order("b", verb, order).refused(404, "no run 'b'")
    page.order("a", "promote", {"checkpoint": "nobody"}).refused(404, "no checkpoint 'nobody'")
    done = page.order("a", "promote", {"checkpoint": "latest"})
    assert "is promoted" in done.json["done"]
    soon("the mark", lambda: "promoted" in page.ask("/api/runs/a").json["checkpoints"][-1]["marks"])


# A run at work


def test_orders_act_on_a_run_at_work(live: Run, live_page: Visitor) -> None:
    def workers(status: Status) -> set[str]:
        return {beat.id for beat in status.roles if beat.role == "worker" and beat.alive}

    assert live_page.order("live", "scale", {"workers": 2}).json == {"done": "scaling to 2 workers"}
    until(live, lambda status: len(workers(status)) == 2)
    automatic = live_page.order("live", "scale", {"auto": True, "min": 1, "max": 3}).json
    assert "between 1 and 3" in automatic["done"]
    soon("the bounds", lambda: live_page.ask("/api/runs/live").json["state"]["scaling"]["max"] == 3)
    live_page.order("live", "scale", {"workers": 1})

    before = live.status().latest
    assert "checkpoint" in live_page.order("live", "checkpoint").json["done"]
    after = until(live, lambda status: status.latest != before).latest
    assert live_page.order("live", "promote", {"checkpoint": after}).json == {"done": f"{after} is promoted"}

    assert live_page.order("live", "note", {"text": "a new reward"}).json == {"done": "the note is added"}
    soon(
        "the note", lambda: "a new reward" in [each["text"] for each in live_page.ask("/api/runs/live").json["events"]]
    )


@pytest.mark.parametrize(
    ("verb", "order", "words"),
    [
        ("scale", {"workers": 0}, "expected at least 1 worker"),
        ("scale", {"workers": "3"}, "workers: Input should be a valid integer"),
        ("scale", {"workers": True}, "workers: Input should be a valid integer"),
        ("scale", {"workers": 3, "auto": True}, "expected {"),
        ("scale", {}, "expected {"),
        ("scale", {"auto": True, "min": 3, "max": 2}, "--min 3 is more than --max 2"),
        ("scale", [3], "should be an object"),
        ("note", {"text": " "}, "a note needs text"),
        ("note", {}, "text: Field required"),
        ("note", {"text": "a" * 2001}, "at most 2000 characters"),
        ("promote", {}, "checkpoint: Field required"),
        ("stop", {"now": True}, "now: Extra inputs are not permitted"),
    ],
)  # fmt: skip
def test_impossible_orders_are_refused(live_page: Visitor, verb: str, order: Any, words: str) -> None:
    live_page.order("live", verb, order).refused(400, words)


def test_bodies_are_bounded_and_json(live_page: Visitor) -> None:
    live_page.order("live", "note", {"text": "a" * 100_000}).refused(413, "more than")
    with contextlib.closing(live_page.connect()) as connection:
        connection.request("POST", "/api/runs/live/note", b"{", live_page.headers)
        reply = connection.getresponse()
        Reply(reply.status, reply.headers, reply.read()).refused(400, "Invalid JSON")


def test_command_line_gives_same_orders(live: Run, ended_run: Run, stagecoach: Stagecoach) -> None:
    here = ("--runs-dir", str(live.config.runs_dir))
    before = live.status().latest
    assert "a checkpoint is written" in stagecoach("checkpoints", "save", "live", *here).ok()
    until(live, lambda status: status.latest != before)
    assert stagecoach("note", "live", "by hand", *here).ok() == "live: noted\n"
    assert "by hand" in [event.text for event in live.events() if event.kind == "note"]
    check_refused(stagecoach("note", "live", " ", *here), "a note needs text")
    ended = ("--runs-dir", str(ended_run.config.runs_dir))
    check_refused(stagecoach("note", "a", "too late", *ended), "run 'a' is not live")
    check_refused(stagecoach("checkpoints", "save", "a", *ended), "run 'a' is not live")


def test_updates_stream_only_while_somebody_listens(live_page: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    def kept() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "page of live"]

    monkeypatch.setattr(view, "_FORGET_SECONDS", 0.5)
    with live_page.updates("live") as stream:
        assert stream.headers["Content-Type"].startswith("text/event-stream")
        kinds: list[str] = []
        versions: set[int] = set()
        while len(versions) < 2 or "rows" not in kinds:
            kind, data = stream.readline().decode(), stream.readline().decode()
            if kind.startswith("event: "):
                assert stream.readline() == b"\n"
                kinds.append(kind.split()[1])
            if kind == "event: snapshot\n":
                versions.add(json.loads(data.removeprefix("data: "))["state"]["version"])
        assert kept()
    soon("the view to be forgotten", lambda: not kept())


def test_server_end_closes_streams(runs_dir: Path) -> None:
    with contextlib.ExitStack() as stack:
        with serve(runs_dir, TOKEN) as url:
            stream = stack.enter_context(Visitor(url).updates("a"))
            assert stream.readline() == b"event: snapshot\n"
        stream.read()
    with pytest.raises(ConnectionRefusedError):
        Visitor(url).ask("/")


def test_store_outage_shows_banner_and_keeps_data(servers: tuple[str, str], tmp_path: Path, unique_run_id: str) -> None:
    with contextlib.closing(FaultProxy(int(servers[1].rpartition(":")[2]))) as proxy:
        config = minimal_config(
            runs_dir=str(tmp_path / "far"), stop_at={"updates": 2}, redis={"url": servers[0]},
            store={"url": "s3://stagecoach", "endpoint_url": f"http://127.0.0.1:{proxy.port}"},
        )  # fmt: skip
        run = Run.start(config, unique_run_id, inline=True)
        assert run.wait(120).reason == "exhausted"
        with serve(config.runs_dir, TOKEN) as url:
            visitor, path = Visitor(url), f"/api/runs/{run.run_id}"
            known = visitor.ask(path).json
            assert (known["banner"], known["state"]["updates"]) == ("", 2)
            proxy.refuse()
            soon("the banner", lambda: "not up to date" in visitor.ask(path).json["banner"])
            assert visitor.ask(path).json | {"banner": ""} == known
            visitor.order(run.run_id, "promote", {"checkpoint": "latest"}).refused(503)
            proxy.heal()
            soon("the banner's end", lambda: visitor.ask(path).json["banner"] == "")
            assert "promoted" in visitor.order(run.run_id, "promote", {"checkpoint": "latest"}).json["done"]


def test_silent_redis_of_one_run_holds_up_no_scrape(live_page: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    attach, refresh, answers = view.Views.attach, RunView.refresh, threading.Event()

    def attached(views: view.Views, run_id: str) -> Any:
        return SimpleNamespace(run_id=run_id) if run_id == "silent" else attach(views, run_id)

    def refreshed(its: RunView) -> None:
        answers.wait() if its.run.run_id == "silent" else refresh(its)

    monkeypatch.setattr(view.Views, "attach", attached)
    monkeypatch.setattr(RunView, "refresh", refreshed)
    monkeypatch.setattr(view, "run_paths", lambda runs_dir: [runs_dir / "silent", runs_dir / "live"])
    monkeypatch.setattr(view, "is_locked", lambda path: True)
    monkeypatch.setattr(view, "_SCRAPE_SECONDS", 0.5, raising=False)
    monkeypatch.setattr(view, "_PATIENCE_SECONDS", 3600.0)
    try:
        soon("the other run", lambda: b'run="live",state="running"' in live_page.ask("/metrics").body)
    finally:
        answers.set()


def test_failed_view_is_reported_and_retried(page: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(view: RunView) -> None:
        raise ValueError("a fault of ours")

    with monkeypatch.context() as patched:
        patched.setattr(RunView, "refresh", broken)
        assert "a fault of ours" in page.ask("/api/runs/a").json["banner"]
    soon("its recovery", lambda: page.ask("/api/runs/a").json["banner"] == "")


# The command


def test_taken_port_and_invalid_tokens_are_one_line(page: Visitor, stagecoach: Stagecoach, tmp_path: Path) -> None:
    port = page.url.rpartition(":")[2]
    check_refused(stagecoach("page", "--port", port), f"port {port} of 127.0.0.1 is in use")
    check_refused(stagecoach("page", "--host", "no.such.host.invalid"), "cannot listen")
    check_refused(stagecoach("page", "nobody"), "no run 'nobody'")
    check_refused(stagecoach("page", "--no-token", "--host", "0.0.0.0"), "only this machine")
    (tmp_path / "short").write_text("secret\n")
    check_refused(stagecoach("page", "--token-file", "short"), "at least 16 characters")
    check_refused(stagecoach("page", "--token-file", "missing"), "cannot be read")
    check_refused(stagecoach("page", "--token-file", "short", "--no-token"), "--token-file")
    check_refused(stagecoach("train", "config.yaml", "--page", "--detach"), "stagecoach page RUN")
    with pytest.raises(UserError, match="is in use"), serve(tmp_path, TOKEN, port=int(port)):
        pass


def test_page_command_serves_until_interrupted(terminal: CommandLine, runs_dir: Path) -> None:
    (terminal.folder / "token").write_text(f"{TOKEN}\n")
    process = terminal.start("page", "a", "--port", "0", "--token-file", "token")
    terminal.wait_until("the URL", lambda: "first line of token" in terminal.output(process))
    url = re.search(r"page: (http://[\d.]+:\d+)/runs/a\n", terminal.output(process))
    assert url is not None
    assert TOKEN not in terminal.output(process)
    assert Visitor(url[1]).ask("/api/runs/a").json["state"]["reason"] == "exhausted"
    process.send_signal(signal.SIGINT)
    assert "its runs continue" in terminal.ended(process).ok()


def test_train_page_lives_as_long_as_run(terminal: CommandLine) -> None:
    config = terminal.write_config(stop_at={"updates": 10**6})
    process = terminal.start("train", config, "--inline", "--page", "--run-id", "a")
    terminal.wait_until("the URL", lambda: "?token=" in terminal.output(process))
    found = re.search(r"page: (http://[\d.]+:\d+)/runs/a\?token=(\S+)\n", terminal.output(process))
    assert found is not None
    visitor = Visitor(found[1], {"Authorization": f"Bearer {found[2]}"})
    terminal.wait_until("an update", lambda: visitor.ask("/api/runs/a").json["state"].get("updates", 0) > 1)
    assert visitor.order("a", "stop").json == {"done": "the run writes a final checkpoint and ends"}
    ended = terminal.ended(process).ok()
    assert ended.count("?token=") == 1
    assert ended.index("page: ") < ended.index("updates"), "before the live view"
    with pytest.raises(ConnectionRefusedError):
        visitor.ask("/")
    terminal.check_ended("a")
