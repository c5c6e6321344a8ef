"""`stagecoach league`: the ratings of a run's players, and who beats whom."""

import contextlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagecoach.coordinator.cli.terminal.console import NARROW, console, progress
from stagecoach.coordinator.cli.terminal.options import RUNS, EndpointUrl, Json, RunsDir, TrustConfig, example, on_run
from stagecoach.shared.base.printable import counted, figure

if TYPE_CHECKING:
    from stagecoach.coordinator.run_access.run import Run

app = typer.Typer()
_PLAYER = (
    "A player: RUN[/CHECKPOINT][#POLICY], RUN#PLAYER for a snapshot of its league, RUN#mean for its mean strategy, a "
    "folder, an .onnx file, module:function, or random."
)
_COLUMNS = ("kind", "rating", "±", "Elo", "matches")
_NAME_WIDTH, _CELL_WIDTH = 24, 14


@app.command(epilog=example("stagecoach league my-run"))
@on_run
def league(run: "Run", as_json: Json = False) -> None:
    """Show a league: its players with their ratings, and win rates of who learned against whom, with their intervals.

    As the newest checkpoint has it; `stagecoach status` and `watch` show the ratings of now.
    """
    from rich.table import Column, Table

    from stagecoach.coordinator.catalog.league import league_of

    found = league_of(run.checkpoint_store(), run.config)
    if as_json:
        console.json(found)
        return
    several = len({row["seat"] for row in found["players"]}) > 1
    player, title = Column("player", overflow="fold"), f"league at {found['checkpoint']}; ± is three deviations"
    troubled = ("forfeits",) if any(row["forfeits"] for row in found["players"]) else ()
    table = Table(player, *_COLUMNS, *troubled, title=title, **NARROW)  # so a snapshot's name fits 80 columns
    for row in found["players"]:
        name = f"{row['player']} ({row['seat']})" if several else row["player"]
        numbers = figure(row["rating"]), figure(3 * row["sigma"]), f"{row['elo']:,.0f}", f"{row['matches']:,}"
        kind = row["kind"] if row["env_steps"] is None else f"at {row['env_steps']:,}"
        table.add_row(name, kind, *numbers, *(f"{row[column]:,}" for column in troubled))
    console.print(table)
    for seat in dict.fromkeys(row["seat"] for row in found["players"]):
        of = {row["player"] for row in found["players"] if row["seat"] == seat}
        if rows := {player: row for player, row in found["payoff"].items() if player in of}:
            console.print(_matrix(found, rows, f" of {seat}" if several else ""))
    if not found["payoff"]:
        console.print("no match has ended yet")


def _matrix(found: dict[str, Any], rows: Mapping[str, Mapping[str, Any]], whose: str) -> Any:
    """Win rates of these rows against their opponents."""
    from rich.table import Table

    order = [row["player"] for row in sorted(found["players"], key=lambda row: row["kind"] != "fixed")]
    met = {opponent for row in rows.values() for opponent in row}
    columns = [player for player in dict.fromkeys((*order, *sorted(met))) if player in met]  # not all are rated
    most = max(2, (console.width - _NAME_WIDTH) // _CELL_WIDTH)  # fixed players first, then the best
    more = f", against the first {most} of {len(columns)} (--json has all)" if len(columns) > most else ""
    columns = columns[:most]
    table = Table("wins against", *columns, title=f"win rates{whose} and their 95 % intervals, mean returns{more}")
    for player in dict.fromkeys(order):
        if player in rows:
            table.add_row(player, *(_cell(rows[player].get(opponent)) for opponent in columns))
    return table


def _cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "–"
    rate = f"{cell['rate']:.0%} of {cell['games']:,}\n{cell['low']:.0%}–{cell['high']:.0%}"
    return f"{rate}\nreturn {figure(cell['mean_return'])}"


@app.command(epilog=example("stagecoach match my-run other-run/best#main --games 500"))
def match(
    first: Annotated[str, typer.Argument(help=_PLAYER)],
    second: Annotated[str, typer.Argument(help="The other one.")],
    games: Annotated[int, typer.Option(min=1, help="How many at least, on all sides together.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Of the starts, which are the same on each side.")] = 0,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Policies take the best action; else they draw one.")
    ] = False,
    trust_config: TrustConfig = False,
    runs_dir: RunsDir = RUNS,
    endpoint_url: EndpointUrl = None,
    as_json: Json = False,
) -> None:
    """Let two players play each other, as many games on each side, from the same starts."""
    from stagecoach.coordinator.catalog.league import match as played

    progress(f"playing {games} games", as_json)
    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):  # what the environment prints is no JSON
        given: dict[str, Any] = {"greedy": greedy, "trust_config": trust_config, "endpoint_url": endpoint_url}
        found = played(first, second, games, runs_dir, seed, **given).as_dict()
    if as_json:
        console.json({"first": first, "second": second, **found})
        return
    low, high = found["interval"]
    lines = [f"as {', '.join(its['side'])}: {_counts(its)}" for its in found["by_side"]]
    lost = zip((first, second), found["forfeits"].values(), strict=True)
    forfeits = "".join(f", {counted(count, 'forfeit')} of {player}" for player, count in lost if count)
    rate = f"win rate {found['win_rate']:.1%} ({low:.1%}–{high:.1%})"
    mean = f"mean return {figure(found['mean_return'])} ± {figure(found['return_error'])}"
    total = f"{first} against {second}: {_counts(found)}{forfeits}; {rate}; {mean}"
    again = "neither player draws its actions: a game may repeat another one, and the interval takes all for different"
    console.text(total, *lines, *([again] if found["may_repeat"] else []))


def _counts(row: Mapping[str, Any]) -> str:
    losses = row["games"] - row["wins"] - row["draws"]
    return f"{counted(row['games'], 'game')}, {row['wins']} won, {row['draws']} drawn, {losses} lost"
