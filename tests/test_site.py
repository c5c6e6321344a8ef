"""The documentation site: builds strictly, lists every page, and works offline, with its search."""

from __future__ import annotations

import base64
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import gymnasium
import numpy as np
import pytest
import torch

from docs.build_site import PAGES, ROOT, SITE, pages_of, site_nav, with_breaks
from docs.python_reference import public_methods
from stagecoach import load_policy
from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.policies.actor_critic import ActorCritic
from stagecoach.shared.policies.serialization import encode_policy

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def site() -> Path:
    """The site as `make docs` builds it: a broken link or anchor fails it."""
    command = [sys.executable, "-m", "docs.build_site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return SITE


def test_site_has_its_pages_and_an_index_of_them(site: Path) -> None:
    index = (site / "llms.txt").read_text()
    for page in pages_of(site_nav()):
        assert (site / page).with_suffix(".html").name == "README.html" or (site / page).with_suffix(".html").is_file()
        assert re.search(rf"^- \[.+\]\({re.escape(page)}\): \w.+\.$", index, re.MULTILINE), page
    copies = [page.relative_to(PAGES).with_suffix(".html") for page in (PAGES / "files").rglob("*.md")]
    assert len(copies) > 20, "files of the repository that pages link to"
    assert [path for path in copies if not (site / path).is_file()] == []


def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    loaded = re.compile(
        r'<(?:script|img|iframe)[^>]* src="(?:https?:)?//|<link[^>]* href="(?:https?:)?//|@import|url\((?:https?:)?//'
    )
    files = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(files) > 50
    assert [path for path in files if loaded.search(path.read_text())] == []


def test_code_in_tables_breaks_between_words_only() -> None:
    page = "<code>a_b</code><table><td>a_b <code>rollout/ep_rew.X &lt;id&gt; QNetwork deltaMax</code></td></table>"
    broken = "<code>rollout/<wbr>ep_<wbr>rew.<wbr>X &lt;id&gt; QNetwork delta<wbr>Max</code>"
    assert with_breaks(page) == f"<code>a_b</code><table><td>a_b {broken}</td></table>"


def test_reference_explains_each_method_of_a_run() -> None:
    """A line with an example, the arguments, and what is returned; nothing that only the command line calls."""
    methods = {name: (function, is_property) for name, function, is_property in public_methods("Run")}
    assert {"attach", "policy", "wait"} < methods.keys() and not {"client", "submit", "take_up"} & methods.keys()
    for name, (function, is_property) in methods.items():
        signature, text = inspect.signature(function), function.__doc__
        arguments = [argument for argument in signature.parameters if argument not in ("self", "cls")]
        assert [one for one in arguments if f"    {one}: " not in text] == [], name
        assert is_property or signature.return_annotation in ("None", None) or "Returns:" in text, name
        assert is_property or re.search(r"[rR]un\.\w+\(", text), f"{name} has no example"


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium, which .ci/run installs")


@pytest.fixture
def page() -> Iterator[Page]:
    """A tab without a network that complains of nothing."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra dev")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_context(offline=True).new_page()
        complaints: list[str] = []
        page.on("console", lambda message: complaints.extend([message.text] * (message.type == "error")))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("requestfailed", lambda request: complaints.append(request.url))
        page.on("request", lambda request: complaints.extend([request.url] * request.url.startswith("http")))
        yield page
        browser.close()
    assert complaints == []


@pytest.mark.processes
@needs_chromium
def test_site_and_search_work_from_files_without_network(site: Path, page: Page) -> None:
    page.goto((site / "index.html").as_uri())
    page.get_by_role("button", name="Search").first.click()
    page.locator("input[placeholder=Search]").press_sequentially("hindsight", delay=50)
    page.get_by_role("option", name="Hindsight").first.click()
    page.wait_for_url("**/*.html?h=hindsight*")
    assert "hindsight" in page.content().lower()


def playground_policy(name: str) -> bytes:
    """The file of a policy that the playground plays."""
    script = (ROOT / "docs" / "assets" / "playground_policies.js").read_text()
    return base64.b64decode(re.findall(rf'^  {name}: "([^"]+)",$', script, re.MULTILINE)[0])


@pytest.mark.processes
@needs_chromium
def test_playground_computes_what_policies_do(site: Path, page: Page) -> None:
    """Probabilities, masks and values of 200 observations; a normalizer and other layers in a file that is dropped."""
    page.goto((site / "playground.html").as_uri())
    rng = np.random.default_rng(1)
    spaces = load_policy(playground_policy("cartpole"))._policy.spaces
    config = PolicyConfig(hidden_sizes=(16, 8, 8), activation="elu", normalize_observations=True, share_encoder=True)
    other = ActorCritic(spaces, config)
    assert other.normalizer is not None
    for moments in cast("Any", other.normalizer).moments.values():
        moments.update(torch.from_numpy(rng.normal(1, 3, (50, 4)).astype(np.float32)))
    files = {name: playground_policy(name) for name in ("cartpole", "tictactoe")} | {"other": encode_policy(other, 3)}
    for name, file in files.items():
        observations: Any = rng.normal(0, 1, (200, 4)).astype(np.float32)
        masks = np.zeros((200, 0))
        if name == "tictactoe":
            marks = rng.integers(0, 3, (200, 9))
            marks[np.arange(200), rng.integers(0, 9, 200)] = 0
            observations = np.stack([marks == 1, marks == 2], axis=-1).astype(np.int8).reshape(200, 3, 3, 2)
            masks = (marks == 0).astype(np.int8)
        found = page.evaluate(
            """([file, observations, masks]) => {
                const bytes = Uint8Array.from(atob(file), (letter) => letter.charCodeAt(0));
                const policy = new playground.Policy(bytes.buffer);
                return observations.map((one, i) => [[...policy.probabilities(one, masks[i])], policy.value(one)]);
            }""",
            [base64.b64encode(file).decode(), observations.reshape(200, -1).tolist(), masks.tolist()],
        )
        policy = load_policy(file)
        for observation, mask, (probabilities, value) in zip(observations, masks, found, strict=True):
            masked = {"observation": observation, "action_mask": mask}
            expected: Any = policy.inspect(masked if len(mask) else observation)
            np.testing.assert_allclose(probabilities, expected.probabilities, rtol=0, atol=1e-5)
            np.testing.assert_allclose(value, expected.value, rtol=1e-5, atol=1e-5)
    chosen = page.locator("input[type=file]")
    chosen.set_input_files({"name": "mine.safetensors", "mimeType": "", "buffer": files["other"]})
    expect(page, "mine.safetensors: version 3, hidden layers 16 × 8 × 8")
    chosen.set_input_files({"name": "game.safetensors", "mimeType": "", "buffer": files["tictactoe"]})
    expect(page, "game.safetensors: CartPole has 4 observations and 2 actions; this policy has 18 and 9")
    chosen.set_input_files({"name": "x.safetensors", "mimeType": "", "buffer": b"nothing"})
    expect(page, "x.safetensors: this is no policy.safetensors of Stagecoach")


def expect(page: Page, text: str) -> None:
    page.get_by_text(text, exact=True).wait_for()


@pytest.mark.processes
@needs_chromium
def test_playground_plays(site: Path, page: Page) -> None:
    """CartPole moves as Gymnasium's and reaches 500 steps; tic-tac-toe by clicks on random squares, 50 games."""
    page.goto((site / "playground.html").as_uri())
    start, end, steps = page.evaluate(
        """() => {
            const play = (game, act, most) => {
                while (game.steps < most && !game.over) game.step(act(game));
                return game.steps;
            };
            const greedy = (game) => playground.policies.cartpole.act(game.state);
            const games = Array.from({ length: 20 }, () => play(new playground.CartPole(), greedy, 500));
            const game = new playground.CartPole();
            const start = game.state;
            play(game, (at) => at.steps % 2, 20);
            return [start, game.state, games];
        }"""
    )
    assert steps == [500] * 20
    env = cast(Any, gymnasium.make("CartPole-v1").unwrapped)
    env.reset(seed=1)
    env.state = np.array(start)
    for step in range(20):
        env.step(step % 2)
    np.testing.assert_allclose(end, env.state, rtol=1e-9, atol=1e-12)
    counts = page.evaluate(
        """() => {
            const root = document.getElementById("tictactoe-game");
            for (let game = 0; game < 50; game++) {
                for (;;) {
                    const free = [...root.querySelectorAll("[aria-label$=empty]")];
                    if (!free.length || /win|draw/.test(root.querySelector("[data-part=result]").textContent)) break;
                    free[Math.floor(Math.random() * free.length)].click();
                }
                root.querySelector("[data-part=again]").click();
            }
            return root.querySelector("[data-part=counts]").textContent;
        }"""
    )
    won, drawn, lost = map(int, re.findall(r"\d+", counts))
    assert won + drawn + lost == 50
    assert lost > 30
    page.locator("#cartpole-game canvas").press("ArrowRight")
    page.wait_for_function("Number(document.querySelector('[data-part=best]').textContent) > 20")
