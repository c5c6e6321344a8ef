"""The page in headless Chromium: what people see of runs that live and that have ended, and do with a keyboard."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stagecoach.coordinator.page.server import serve
from stagecoach.coordinator.page.view import RunView
from stagecoach.coordinator.run_access.run import Run
from stagecoach.coordinator.run_access.run_list import list_runs
from tests.conftest import minimal_config
from tests.support.environments.small import CHASE, CHASE_POLICIES
from tests.support.processes.page import TOKEN, live_run, soon
from tests.support.suite.speed import stretched

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
)  # fmt: skip
AWAY = "is not responding"
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium, which .ci/run installs"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra dev")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


class Visitor:
    """A browser's tab that has the token, and keeps what its console says."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.said: list[str] = []
        self.expected = ["ERR_"]
        """What the browser itself says of a server that is away, or refuses."""
        page.set_default_timeout(1000 * stretched(15))
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))

    def enter(self, url: str, path: str = "/") -> Page:
        self.page.goto(f"{url}/?token={TOKEN}")
        self.page.goto(f"{url}{path}")
        return self.page

    @property
    def env_steps(self) -> int:
        return int(self.tile("env steps").replace(",", ""))

    def tile(self, name: str) -> str:
        """The value under this name at the head of a run's page."""
        term = self.page.locator("dt").get_by_text(name, exact=True)
        return self.page.locator(".summary > div", has=term).locator("dd").inner_text()


@pytest.fixture
def visitor(browser: Browser) -> Iterator[Visitor]:
    """Its console must stay empty but for what is expected."""
    with contextlib.closing(browser.new_context(color_scheme="dark")) as context:
        visitor = Visitor(context.new_page())
        yield visitor
    assert [line for line in visitor.said if not any(words in line for words in visitor.expected)] == []


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run at work, `live`, in a thread of this process."""
    sections: dict[str, Any] = {"evaluation": {"episodes": 2}, "checkpoint": {"every": "100 updates"}}
    with live_run(tmp_path_factory.mktemp("live"), **sections) as run:
        yield run


def test_page_of_live_run_updates(live: Run, visitor: Visitor) -> None:
    with serve(live.config.runs_dir, TOKEN) as url:
        page = visitor.enter(url, "/runs/live")
        page.locator("#panel-return canvas").wait_for()
        page.locator(".state", has_text="running").wait_for()
        before = visitor.env_steps
        soon("more env steps on the page", lambda: visitor.env_steps > before)
        page.locator("#panel-fleet tbody tr", has_text="worker-0").wait_for()
        text = "<img src=x onerror=alert(1)> is text"
        page.get_by_role("button", name="Note …").click()
        page.get_by_role("dialog").get_by_label("Text for the run's events").fill(text)
        page.keyboard.press("Enter")
        page.locator("#panel-timeline").scroll_into_view_if_needed()
        page.locator("#panel-timeline td", has_text=text).wait_for()
        page.get_by_role("button", name="Stop …").click()
        page.get_by_role("dialog").get_by_text("Cancel").click()
        page.get_by_role("button", name="Scale …").click()
        page.keyboard.press("Escape")
        assert page.get_by_role("dialog").count() == 0
        assert live.live


def test_page_shows_banner_while_server_is_away(live: Run, visitor: Visitor) -> None:
    with serve(live.config.runs_dir, TOKEN) as url:
        page = visitor.enter(url, "/runs/live")
        page.locator("#panel-return canvas").wait_for()
    page.locator("#banner", has_text=AWAY).wait_for()
    before = visitor.env_steps
    with serve(live.config.runs_dir, TOKEN, port=int(url.rpartition(":")[2])):
        page.get_by_role("button", name="Retry now").click()
        page.locator("#banner").wait_for(state="hidden")
        soon("more env steps on the page", lambda: visitor.env_steps > before)
        page.locator("#panel-return canvas").wait_for()


def test_page_shows_ended_run_from_store(runs_dir: Path, visitor: Visitor) -> None:
    with serve(runs_dir, TOKEN) as url:
        page = visitor.enter(url)
        page.get_by_role("link", name="a", exact=True).click()
        page.locator(".state", has_text="finished").wait_for()
        for panel in ("return", "stability", "lag"):
            page.locator(f"#panel-{panel}").scroll_into_view_if_needed()
            page.locator(f"#panel-{panel} canvas").first.wait_for()
        page.locator("#panel-lag .plot[aria-label*='; bound ']").wait_for()  # of the config
        page.locator("#panel-config").scroll_into_view_if_needed()
        for panel in ("success", "video"):
            page.locator(f"#panel-{panel} .absent").wait_for()
        assert all(page.locator(f"#panel-{panel}").is_hidden() for panel in ("league", "ratings", "curriculum"))
        page.locator("#panel-timeline .mark.best").wait_for()
        page.locator("#panel-ledger .sentence", has_text="balances").wait_for()
        page.locator("#panel-config td", has_text="CartPole-v1").wait_for()
        assert page.get_by_role("button", name="Stop …").is_disabled()
        page.get_by_role("button", name="Promote …").click()
        page.get_by_role("dialog").get_by_role("button", name="Promote", exact=True).click()
        page.locator("#messages", has_text="is promoted").wait_for()
        page.locator("#panel-timeline").scroll_into_view_if_needed()
        page.locator("#panel-timeline .mark.promoted").wait_for()


def test_page_shows_league_and_win_rates(tmp_path: Path, visitor: Visitor) -> None:
    environment = CHASE | {"kwargs": {"counts": False}}
    league = {"fixed": {"dice": "random"}, "opponents": {"latest": 0.3, "past": 0.3, "fixed": 0.4}}
    config = minimal_config(
        runs_dir=str(tmp_path / "runs"), environment=environment, league=league,
        rollout={"workers": 1, "fragment_steps": 8, "fragments_per_update": 2}, **CHASE_POLICIES,
    )  # fmt: skip
    run = Run.start(config, "cats", inline=True)
    assert run.wait(120).reason == "exhausted"
    videos = run.folder.path / "videos"
    videos.mkdir()
    for seconds, name in enumerate(("b.mp4", "c.mp4", "a.mp4")):
        (videos / name).write_bytes(b"moving")
        os.utime(videos / name, (seconds, seconds))
    with serve(config.runs_dir, TOKEN) as url:
        page = visitor.enter(url, "/runs/cats")
        page.locator("#panel-league").scroll_into_view_if_needed()
        for player in ("hunter", "prey", "dice"):  # in the seats of both, whose ratings do not compare
            for seat in ("hunter", "prey") if player == "dice" else (player,):
                page.locator("#panel-league td", has_text=f"{player} ({seat})").first.wait_for()
        for seat in ("hunter", "prey"):
            page.locator("#panel-league h4", has_text=f"Win rates of {seat} at").wait_for()
        page.locator("#panel-league td", has_text="% of").first.wait_for()
        page.locator("#panel-league td", has_text="at 0 steps").first.wait_for()
        page.locator("#panel-timeline").scroll_into_view_if_needed()
        page.locator("#panel-timeline td", has_text="worker").first.wait_for()
        page.locator("#panel-ratings").scroll_into_view_if_needed()
        page.locator("#panel-ratings canvas").wait_for()
        page.locator("#panel-ratings .legend", has_text="hunter").wait_for()
        page.locator(".summary dt", has_text="rating of hunter").wait_for()
        page.locator("#panel-return .legend", has_text="prey").wait_for()  # and not what both sides together get
        shown = page.locator("#panel-return .legend button").all_inner_texts()
        assert [words.split()[0] for words in shown] == ["hunter", "prey"]
        entropy = page.locator("#panel-stability figure", has=page.locator("figcaption", has_text="entropy"))
        entropy.scroll_into_view_if_needed()
        entropy.locator(".legend", has_text="prey").wait_for()
        page.locator("#panel-video video[aria-label='a.mp4']").wait_for(state="attached")  # the newest
        page.goto(f"{url}/")
        page.locator("td", has_text="(rating of ").wait_for()


def test_checked_runs_share_a_chart_and_best_is_the_same(runs_dir: Path, visitor: Visitor) -> None:
    shutil.copytree(runs_dir / "a", runs_dir / "b")
    store = runs_dir / "b" / "s3" / "stagecoach"
    (store / "a").rename(store / "b")
    rows = {row.run_id: row for row in list_runs(runs_dir)}
    with serve(runs_dir, TOKEN) as url:
        page = visitor.enter(url)
        for name in rows:
            page.get_by_label(f"Show {name} in the chart").check()
        page.locator(".overlay .legend button").nth(1).wait_for()
        assert [key.split()[0] for key in page.locator(".overlay .legend button").all_inner_texts()] == ["a", "b"]
        page.locator("tr", has_text="CartPole-v1").filter(has_text="ppo").first.wait_for()
        page.get_by_label("Show b in the chart").uncheck()
        page.locator(".overlay .legend button", has_text="b").wait_for(state="detached")
        page.goto(f"{url}/runs/a")
        page.locator("#panel-return canvas").wait_for()
        assert float(visitor.tile("best")) == pytest.approx(rows["a"].best, rel=1e-3)
        page.locator("#panel-timeline").scroll_into_view_if_needed()
        best = page.locator("#panel-timeline tr", has=page.locator(".mark.best")).locator("td").nth(2)
        soon("the same score in the list of checkpoints", lambda: best.inner_text() == visitor.tile("best"))


def test_page_works_by_keyboard_and_charts_have_tables(runs_dir: Path, visitor: Visitor) -> None:
    with serve(runs_dir, TOKEN) as url:
        page = visitor.enter(url, "/runs/a")
        page.locator("#panel-return canvas").wait_for()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        table = page.get_by_role("button", name="Return as a table")
        table.press("Enter")
        row = page.locator("#panel-return tbody tr").first
        row.wait_for()
        assert row.locator("td").count() == 5  # env steps, return, two percentiles, evaluation
        assert page.locator("#panel-return canvas").is_hidden()
        table.press("Enter")
        chart = page.locator("#panel-return .plot")
        newest = chart.get_attribute("aria-label")
        chart.press("ArrowLeft")
        assert "newest" in str(newest)
        soon("the cursor to move", lambda: "env steps" in str(chart.get_attribute("aria-label")))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        page.locator("#theme").press("Enter")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        page.get_by_role("button", name="Time", exact=True).press("Enter")
        assert page.url.endswith("?x=time")
        reached = page.evaluate(
            "[...document.querySelectorAll('button, input, select, a[href]')].every((one) => one.tabIndex === 0)"
        )
        assert reached


def test_click_on_a_chart_explains_the_version_there(tmp_path: Path, visitor: Visitor) -> None:
    config = minimal_config(
        runs_dir=str(tmp_path), archive="all", evaluation={"episodes": 0}, stop_at={"updates": 20},
        rollout={"workers": 2, "fragment_steps": 8, "fragments_per_update": 2},
    )  # fmt: skip
    Run.start(config, "a", inline=True).wait(120)
    with serve(tmp_path, TOKEN) as url:
        page = visitor.enter(url, "/runs/a")
        page.locator("#panel-return .u-over").click()
        dialog = page.get_by_role("dialog")
        dialog.wait_for()
        assert 5 <= int(dialog.get_by_label("Policy version").input_value()) <= 15, "in the middle"
        dialog.get_by_label("Updates to explain").fill("3")
        dialog.get_by_role("button", name="Explain").click()
        dialog.get_by_text("By episode").wait_for()
        fragments, episodes = (dialog.locator("table").nth(index).locator("tbody tr").count() for index in (0, 1))
        assert fragments == 6 and episodes > fragments
        assert "By worker: worker-" in dialog.inner_text()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 820, 1440])
def test_nothing_is_wider_than_the_screen(runs_dir: Path, visitor: Visitor, width: int, theme: Any) -> None:
    with serve(runs_dir, TOKEN) as url:
        visitor.page.set_viewport_size({"width": width, "height": 800})
        visitor.page.emulate_media(color_scheme=theme)
        for path in ("/", "/runs/a"):
            page = visitor.enter(url, path)
            page.locator("table").first.wait_for()
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            cut = "[...document.querySelectorAll('.tiles small')].some((s) => s.scrollWidth > s.clientWidth)"
            assert not page.evaluate(cut)


def test_page_shows_thousand_workers(runs_dir: Path, visitor: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = RunView.snapshot

    def with_workers(view: RunView) -> dict[str, Any]:
        found = snapshot(view)
        beats = [_beat(index) for index in range(1000)] if found["state"] else []
        return found | {"state": {**found["state"], "live": True, "roles": beats}}

    monkeypatch.setattr(RunView, "snapshot", with_workers)
    with serve(runs_dir, TOKEN) as url:
        page = visitor.enter(url, "/runs/a")
        fleet = page.locator("#panel-fleet")
        fleet.scroll_into_view_if_needed()
        fleet.get_by_text("1–50 of 1,000").wait_for()
        assert fleet.locator("tbody tr").count() == 50
        fleet.get_by_role("button", name="restarts").click()
        fleet.locator("tbody tr").first.get_by_text("worker-999", exact=True).wait_for()
        fleet.get_by_role("searchbox").fill("worker-77")
        fleet.get_by_text("worker-777", exact=True).wait_for()
        assert fleet.locator("tbody tr").count() == 11


def _beat(index: int) -> dict[str, Any]:
    return {
        "role": "worker", "id": f"worker-{index}", "stamp": "1.000000", "age_seconds": 0.5, "alive": True,
        "host": "host", "ended": None, "waiting_for": None, "waiting_seconds": 0.0, "last_error": None,
        "process": "1", "progress": {"transitions": 0, "incarnation": index, "version": 1},
    }  # fmt: skip
