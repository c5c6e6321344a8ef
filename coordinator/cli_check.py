"""`stagecoach check`: an environment is tried, and everything that is wrong with it is told at once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.cli_options import Json, console, example, print_json
from shared.errors import ConfigError
from shared.printable import counted
from shared.user_code import extend_imports

if TYPE_CHECKING:
    from coordinator.environment_trial import Trial
    from shared.config import Config

app = typer.Typer()
_STYLES = {"fatal": "red", "raised": "red", "wrong": "yellow", "note": "dim"}


@app.command(epilog=example("stagecoach check own_environment:make --kwargs '{\"length\": 12}'"))
def check(
    environment: Annotated[str, typer.Argument(metavar="ENV|CONFIG", help="An id, module:factory, or a config file.")],
    steps: Annotated[int, typer.Option(min=1, help="Random steps, in as many episodes as that takes.")] = 300,
    seed: Annotated[int, typer.Option(min=0, help="Of its first episode, and of the actions.")] = 0,
    deadline: Annotated[float, typer.Option(min=0.1, help="Seconds that one call may take.")] = 30.0,
    kwargs: Annotated[
        str | None, typer.Option(metavar="JSON", help="Keyword arguments of the environment or the factory.")
    ] = None,
    api: Annotated[str | None, typer.Option(help="gymnasium or pettingzoo (parallel); by default what it is.")] = None,
    as_json: Json = False,
) -> None:
    """Step an environment in a process of its own and tell everything that is wrong with it: a wrong interface,
    shapes, dtypes, bounds, NaN, hangs, crashes, seeds that it does not follow. Exit code 2 if anything is."""
    from coordinator.environment_trial import try_environment

    config, alone = _config(environment, kwargs, api)
    trial = try_environment(config, steps, seed, deadline, whole=True, alone=alone, any_api=alone and api is None)
    if as_json:
        print_json(trial.as_dict())
    else:
        _print(config.environment.id, trial, steps)
    if not trial.fine:
        raise typer.Exit(2)


def _config(environment: str, kwargs: str | None, api: str | None) -> tuple[Config, bool]:
    """The config file, or a config around the environment alone; which of them."""
    from shared.config_sources import load_config, parse_config

    path = Path(environment)
    given: dict[str, Any] = {}
    try:
        given |= {"kwargs": json.loads(kwargs)} if kwargs is not None else {}
    except ValueError as error:
        raise ConfigError(f"--kwargs {kwargs!r} is not JSON ({error}); expected such as '{{\"length\": 12}}'") from None
    given |= {"api": api} if api is not None else {}
    if path.suffix in (".yaml", ".yml") or path.is_file():
        extend_imports([os.getcwd(), str(path.resolve().parent)])
        return load_config(path, [f"environment.{name}={json.dumps(value)}" for name, value in given.items()]), False
    extend_imports([os.getcwd()])
    return parse_config({"environment": {"id": environment} | given, "stop_at": {"updates": 1}}), True


def _print(name: str, trial: Trial, steps: int) -> None:
    if trial.description is not None:
        for agent, policy_id in trial.description.agents.items():
            spaces = trial.description.policies[policy_id]
            console.print(f"agent {agent}: {_leaves(spaces.observation)} → {_leaves(spaces.action)}", highlight=False)
    if trial.error is not None:
        console.print(f"fatal   {trial.error}", style="red", highlight=False, soft_wrap=True)
    for problem in trial.problems:
        console.print(f"{problem.severity:<7} {problem.found}", style=_STYLES[problem.severity], soft_wrap=True)
        console.print(f"        expected {problem.expected}; {problem.remedy}", highlight=False, soft_wrap=True)
    if trial.stack:
        console.print(f"where it hangs, innermost first:\n{trial.stack.rstrip()}", highlight=False, soft_wrap=True)
    count = sum(problem.severity != "note" for problem in trial.problems) + (trial.error is not None)
    told = f"{counted(count, 'thing')} {'are' if count > 1 else 'is'} wrong"
    told = told if count else f"nothing is wrong in {counted(steps, 'step')}"
    console.print(f"{name}: {told}", highlight=False, soft_wrap=True)


def _leaves(space: Any) -> str:
    return ", ".join(
        f"{leaf.path or leaf.kind} {leaf.shape or ''} {leaf.dtype}".replace("  ", " ") for leaf in space.leaves
    )
