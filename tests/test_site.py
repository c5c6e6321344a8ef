"""The documentation site: builds strictly, lists every page, and works offline, with its search."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs.build_site import PAGES, ROOT, SITE, pages_of, site_nav

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


@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium, which .ci/run installs")
def test_site_and_search_work_from_files_without_network(site: Path) -> None:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra dev")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_context(offline=True).new_page()
        complaints: list[str] = []
        page.on("console", lambda message: complaints.extend([message.text] * (message.type == "error")))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("requestfailed", lambda request: complaints.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.get_by_role("button", name="Search").first.click()
        page.locator("input[placeholder=Search]").press_sequentially("hindsight", delay=50)
        page.get_by_role("option", name="Hindsight").first.click()
        page.wait_for_url("**/*.html?h=hindsight*")
        assert "hindsight" in page.content().lower()
        browser.close()
    assert complaints == []
