"""The JavaScript client: Node plays through a network that cuts, and the example's page plays in headless Chromium."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from stagecoach.rollout_worker.gateway.conformance import run_suite
from stagecoach.rollout_worker.gateway.tokens import add_token
from tests.support.processes.page import soon
from tests.support.runs.external_run import SPACES, learned, place_of, start, total
from tests.support.services.fault_proxy import FaultProxy
from tests.support.suite.speed import stretched

CLIENT = Path(__file__).parents[2] / "clients/javascript"
NODE, CHROMIUM = shutil.which("node"), shutil.which("chromium")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

PROGRAM = """
const [client, url, token, folder, first, episodes] = process.argv.slice(1);
const { Session, fileJournal } = await import(client);

async function play(name) {
  const journal = await fileJournal(`${folder}/${name}`);
  const session = new Session(url, token, `s${name}`, { journal, spaces: SPACES });
  let turn = Number(first);
  for (let episode = 0; episode < episodes; episode++) {
    const observation = Float32Array.of(name, turn);
    await session.reset(observation);
    for (let left = (7 * episode) % 9; left >= 0; left--) {
      observation[1] = ++turn;
      const answer = session.step(1, observation, { terminated: left === 0, info: { left } });
      console.log(JSON.stringify([name, turn - 1]));
      await answer;
    }
    turn += 1;
  }
  const left = await session.settle(60);
  await session.close();
  if (left > 0) throw new Error(`${left} messages were not acknowledged`);
}

await Promise.all([0, 1].map(play));
"""
"""Prints the observation of each turn once its outcome is in the journal."""


def web_socket_flag() -> list[str]:
    """The flag of a Node whose WebSocket needs one; skips without a WebSocket."""
    for flags in ([], ["--experimental-websocket"]):
        command = [str(NODE), *flags, "-e", "WebSocket"]
        if NODE is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return flags
    pytest.skip("needs Node with a WebSocket, version 20.10 or newer")


def test_node_program_is_learned_once_through_cuts_and_a_kill(tmp_path: Path) -> None:
    flags = web_socket_flag()
    run = start(tmp_path)
    place, token = urlsplit(place_of(run)), add_token(run.checkpoint_store().store, "robot")
    assert place.port is not None
    proxy = FaultProxy(place.port)

    def program(first: int, episodes: int) -> subprocess.Popen[str]:
        url = f"ws://127.0.0.1:{proxy.port}{place.path}"
        client = (CLIENT / "stagecoach_client.mjs").as_uri()
        command = [str(NODE), *flags, "--input-type=module", "-e", PROGRAM.replace("SPACES", json.dumps(SPACES))]
        arguments = [client, url, token, str(tmp_path), str(first), str(episodes)]
        return subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)

    with closing(proxy):
        killed = program(0, 10**6)
        assert killed.stdout is not None
        lines = list[str]()
        for cuts in range(30):
            lines.extend(islice(killed.stdout, 4))
            proxy.cut() if cuts % 2 else proxy.cut_reply(10 * cuts)
        killed.kill()
        lines.extend(killed.stdout)
        killed.communicate()
        second = program(10**6, 60)
        while second.poll() is None:
            time.sleep(0.3)
            proxy.cut()
        assert second.returncode == 0
        lines.extend(second.communicate()[0].splitlines())
        assert proxy.cuts > 30
    run.stop()
    run.wait(60)
    counted, accounts = learned(run), total(run)
    played = {tuple(json.loads(line)) for line in lines}
    late = accounts["dropped"].get("stale", {}).get("transitions", 0)
    assert set(counted.values()) == {1} and len(played - counted.keys()) <= late
    assert accounts["balances"]


@pytest.mark.exhaustive
def test_node_program_passes_every_conformance_scenario() -> None:
    results = list(run_suite([str(NODE), *web_socket_flag(), str(CLIENT / "conformance.mjs")]))
    assert len(results) > 30 and [each for each in results if each.problem] == []


@pytest.fixture
def page() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra dev")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page, complaints = browser.new_page(), list[str]()
        page.set_default_timeout(1000 * stretched(60))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        yield page
        browser.close()
    assert complaints == []


STORED = """async ([url, token]) => {
  const { Session, storageJournal } = await import("../stagecoach_client.mjs");
  const session = new Session(url, token, "stored", { journal: storageJournal("stored") });
  if (localStorage.stored) return session.settle(60);
  for (let turn = 0; turn < 3; turn++) {
    await session.reset([0, 0, 0, 0]);
    await session.step(1, [0, 0, 0, 0], { terminated: true });
  }
  return session.settle(0);
}"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium, which .ci/run installs")
def test_example_page_plays_in_chromium(tmp_path: Path, page: Any) -> None:
    """An unknown token is reported, the policy advances while the page plays, and a journal survives a reload."""
    config = yaml.safe_load((CLIENT / "example/catch.yaml").read_text())
    config["environment"]["num_envs"] += 1  # for the session with a journal
    sections = {name: config[name] for name in ("environment", "algorithm", "rollout")}
    run = start(tmp_path, **sections)
    place, token = place_of(run), add_token(run.checkpoint_store().store, "robot")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(CLIENT))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.goto(f"http://127.0.0.1:{server.server_port}/example/")
        page.get_by_label("Gateway").fill(place)
        for tried in ("wrong", token):
            page.get_by_label("Token").fill(tried)
            page.get_by_role("button", name="Play").click()
            if tried == "wrong":
                page.locator("#message", has_text="unauthorized").wait_for()
        soon("a newer policy", lambda: page.locator("#version").inner_text() not in ("–", "-1", "0", "1"))
        soon("episodes", lambda: int(page.locator("#episodes").inner_text()) > 20)
        page.reload()
        assert page.evaluate(STORED, [place, token]) > 0
        page.reload()
        assert page.evaluate(STORED, [place, token]) == 0
        server.shutdown()
    run.stop()
    run.wait(60)
