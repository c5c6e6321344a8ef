"""Takes the pictures of docs/page with Debian's chromium: `python docs/page_pictures.py RUNS_DIR RUN`."""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from stagecoach.coordinator.page.server import serve

TOKEN = "only-for-these-pictures"
WIDTHS = {"desktop": 1280, "tablet": 820, "phone": 390}
RUNS = 3


def take_pictures(runs_dir: Path, run_id: str, folder: Path) -> None:
    """Writes a picture of the run for each width, and of the list with its newest runs checked."""
    with serve(runs_dir, TOKEN) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, width in WIDTHS.items():
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.goto(f"{url}/?token={TOKEN}")
            page.goto(f"{url}/runs/{run_id}")
            page.locator("#panel-return canvas").wait_for()
            page.wait_for_timeout(1000)
            page.screenshot(path=folder / f"{name}.png")
        page = browser.new_page(viewport={"width": WIDTHS["desktop"], "height": 700})
        page.goto(f"{url}/?token={TOKEN}")
        boxes = page.get_by_role("checkbox")
        boxes.first.wait_for()
        for index in range(min(RUNS, boxes.count())):
            boxes.nth(index).check()
        page.locator(".overlay canvas").wait_for()
        page.wait_for_timeout(1000)
        page.screenshot(path=folder / "list.png")
        browser.close()


if __name__ == "__main__":
    take_pictures(Path(sys.argv[1]), sys.argv[2], Path(__file__).parent / "page")
