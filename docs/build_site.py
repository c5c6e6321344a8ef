"""Builds the documentation site: pages from docs/ into .site/pages, and those into site/; `make docs` runs it.

Links that leave docs/ lead on the site to copies of the files that they name. `llms.txt` lists every page.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.python_reference import python_markdown

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = ROOT / ".site" / "pages"
SITE = ROOT / "site"

AT_ROOT = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Documents outside docs/ that are pages of the site. README.md is not: the site begins with docs/index.md."""

GENERATED = "reference/python.md"
"""The page that is written from docstrings when the site is built."""

_CODE_OR_LINK = re.compile(r"^```.*?^```|`[^`\n]+`|\]\((?P<target>[^)#\s]+)", re.MULTILINE | re.DOTALL)
_TABLE_CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".toml": "toml", ".sh": "bash"}


def site_nav() -> list[Any]:
    """Returns the navigation tree of zensical.toml."""
    tree: list[Any] = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    return tree


def pages_of(nav: Any) -> Iterator[str]:
    """Yields the pages of a navigation tree, or of a part of one, in order."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(entry)


def stage() -> None:
    """Writes the pages of the site to `PAGES`, with their links as the site has them."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(DOCS, PAGES, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    linked: set[Path] = set()
    for source in [*DOCS.rglob("*.md"), *(ROOT / name for name in AT_ROOT)]:
        _site_path(source).write_text(_with_site_links(source, linked))
    for path in linked:
        _write_copy(path)
    (PAGES / GENERATED).write_text(python_markdown())
    (PAGES / "llms.txt").write_text(llms_txt())


def llms_txt() -> str:
    """Returns the index of the staged pages for language models: title, address and first sentence of each."""
    lines = ["# Stagecoach", "", f"> {_first_sentence((PAGES / 'index.md').read_text())}"]
    for entry in site_nav():
        ((section, value),) = entry.items()
        lines += ["", f"## {section}", ""]
        for page in pages_of(value):
            text = (PAGES / page).read_text()
            title = re.search(r"^# (.+)$", text, re.MULTILINE)
            lines.append(f"- [{title[1] if title else page}]({page}): {_first_sentence(text)}")
    return "\n".join(lines) + "\n"


def _first_sentence(page: str) -> str:
    """Returns the first sentence below the page's title, without links."""
    for paragraph in re.split(r"\n\s*\n", page):
        if not re.match(r"[#<|`>!-]", paragraph):
            plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
            return re.split(r"(?<=[.:])\s", plain)[0].rstrip(":.") + "."
    return ""


def _site_path(source: Path) -> Path:
    """Returns where a file of the repository is on the site."""
    if source.is_relative_to(DOCS):
        return PAGES / source.relative_to(DOCS) / ("README.md" if source.is_dir() else "")
    if source.name in AT_ROOT:
        return PAGES / source.name
    if source == ROOT / "README.md":
        return PAGES / "index.md"
    path = source.relative_to(ROOT) / ("index" if source.is_dir() else "")
    return PAGES / "files" / path.with_name(f"{path.name}.md")


def _with_site_links(source: Path, linked: set[Path]) -> str:
    """Returns a page's text with rewritten links; collects in `linked` the files of the repository they lead to."""

    def rewritten(match: re.Match[str]) -> str:
        if match["target"] is None or re.match(r"[a-z]+:", match["target"]):
            return match[0]
        path = (source.parent / match["target"]).resolve()
        target = _site_path(path)
        if target.is_relative_to(PAGES / "files"):
            linked.add(path)
        return f"]({os.path.relpath(target, _site_path(source).parent)}"

    return _CODE_OR_LINK.sub(rewritten, source.read_text())


def _write_copy(path: Path) -> None:
    """Writes a page that shows a file of the repository, or lists a folder."""
    page = _site_path(path)
    name = path.relative_to(ROOT).as_posix()
    page.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shown = "\n".join(f"- `{name}/{file}`" for file in sorted(os.listdir(path)) if not file.startswith(("_", ".")))
    else:
        shown = f"````{_LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}````"
    page.write_text(f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\nA copy from the repository.\n\n{shown}\n")


def with_breaks(page: str) -> str:
    """Returns an HTML page whose code in tables may break behind `_`, `/`, `.` and before capitals, not in words."""

    def broken(table: re.Match[str]) -> str:
        return _TABLE_CODE.sub(
            lambda code: re.sub(r"(?<=\w[_/.:])(?=\w)|(?<=[a-z])(?=[A-Z])", "<wbr>", code[0]), table[0]
        )

    return re.sub(r"<table>.*?</table>", broken, page, flags=re.DOTALL)


def main() -> None:
    """Stages the pages and builds the site, strictly."""
    stage()
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    built = subprocess.run(command, cwd=ROOT, check=False)
    if built.returncode == 0:
        for page in PAGES.rglob("*.md"):  # what llms.txt leads to
            shutil.copy(page, SITE / page.relative_to(PAGES))
        for html in SITE.rglob("*.html"):
            html.write_text(with_breaks(html.read_text()))
        print(f"{sum(1 for _ in SITE.rglob('*.html'))} pages in {SITE.relative_to(ROOT)}/; open {SITE.name}/index.html")
    sys.exit(built.returncode)


if __name__ == "__main__":
    main()
