"""`stagecoach evaluate` and `stagecoach play`: a checkpoint plays, for its score or for people to see."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli_options import RUNS, Json, RunsDir, TrustConfig, console, example, figure, print_json, run_ids
from shared.printable import counted

if TYPE_CHECKING:
    from coordinator.evaluate import Evaluation

app = typer.Typer()
_Target = Annotated[
    str,
    typer.Argument(metavar="RUN|CHECKPOINT", help="RUN (its best), RUN/NAME, or a folder.", autocompletion=run_ids),
]
_Stochastic = Annotated[bool, typer.Option("--stochastic", help="Draw actions as in training.")]


@app.command(epilog=example("stagecoach evaluate my-run --episodes 20 --video videos"))
def evaluate(
    target: _Target,
    episodes: Annotated[
        int | None, typer.Option(min=1, help="How many; by default what the run's config says.")
    ] = None,
    video: Annotated[Path | None, typer.Option(metavar="DIR", help="Record each episode there as MP4.")] = None,
    stochastic: _Stochastic = False,
    trust_config: TrustConfig = False,
    runs_dir: RunsDir = RUNS,
    as_json: Json = False,
) -> None:
    """Play a checkpoint, greedily unless told otherwise, and print its score."""
    from coordinator.evaluate import evaluate as score

    with contextlib.redirect_stdout(sys.stderr if as_json else sys.stdout):  # what the environment prints is no JSON
        found = score(target, runs_dir, episodes, video, stochastic=stochastic, trust_config=trust_config)
    if as_json:
        print_json({"checkpoint": found.checkpoint, **found.scores, "videos": [str(path) for path in found.videos]})
        return
    _print_scores(found)


@app.command(epilog=example("stagecoach play my-run --episodes 3"))
def play(
    target: _Target,
    episodes: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
    stochastic: _Stochastic = False,
    trust_config: TrustConfig = False,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Watch a checkpoint play: the environment shows itself (render_mode=human)."""
    from coordinator.evaluate import evaluate as score

    _print_scores(score(target, runs_dir, episodes, show=True, stochastic=stochastic, trust_config=trust_config))


def _print_scores(found: Evaluation) -> None:
    scores = {name: figure(value) for name, value in found.scores.items() if isinstance(value, float)}
    one = f"{scores['mean_return']} in one episode of {counted(round(found.scores['mean_length']), 'step')}"
    many = (
        f"{scores['mean_return']} ± {scores['std_return']} over {counted(found.scores['episodes'], 'episode')} "
        f"(min {scores['min_return']}, max {scores['max_return']}, mean length {scores['mean_length']})"
    )
    text = one if found.scores["episodes"] == 1 else many
    console.print(f"{found.checkpoint}: {text}", highlight=False, soft_wrap=True)
    for path in found.videos:
        console.print(f"video: {path}", soft_wrap=True)
