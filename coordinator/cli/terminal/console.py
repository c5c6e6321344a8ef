"""The console of the command line."""

import json
import sys
from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from stagecoach.shared.base.printable import printable

NARROW: dict[str, Any] = {"box": None, "padding": (0, 2, 0, 0), "header_style": "dim"}
"""Options of a table that is to fit 80 columns."""


class PrintableConsole(Console):
    """A console on which text from outside stays text: no markup, and nothing that a terminal would obey."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, **options)  # names, reasons and paths may hold brackets

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text, len(text), lines=True), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escapes all printed text; every renderable passes through here."""
        for segment in super().render(renderable, options):
            escaped = segment.text if segment.control else printable(segment.text, len(segment.text), lines=True)
            yield segment._replace(text=escaped)

    def text(self, *lines: object) -> None:
        """Prints lines as they are: neither highlighted nor broken."""
        for line in lines:
            self.print(str(line), highlight=False, soft_wrap=True)

    def json(self, data: Any) -> None:
        """Prints JSON; dataclasses become objects, other types text."""
        print(json.dumps(data, indent=1, default=lambda item: vars(item) if is_dataclass(item) else str(item)))


console = PrintableConsole()


def progress(what: str, silent: bool = False) -> None:
    """Says on standard error, if that is a terminal, what a command begins that may take seconds."""
    if sys.stderr.isatty() and not silent:
        PrintableConsole(stderr=True).print(f"{what} …", style="dim")
