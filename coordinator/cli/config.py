"""The commands about configs and what they need: `presets` (the examples, which the package carries), `init`, `config`,
`doctor`, and `check`, which lists all defects of an environment at once."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from stagecoach.coordinator.cli.terminal.console import console
from stagecoach.coordinator.cli.terminal.options import Exit, Json, Sets, example
from stagecoach.shared.base.errors import ConfigError, RunExists, UserError
from stagecoach.shared.base.printable import counted
from stagecoach.shared.base.user_code import extend_imports
from stagecoach.shared.config.presets import config_file, list_presets, names_config

if TYPE_CHECKING:
    from stagecoach.coordinator.diagnostics.environment_trial import Trial
    from stagecoach.shared.config.run_config import Config

app = typer.Typer()
_STYLES = {
    "ok": "green", "warn": "yellow", "fail": "red", "fatal": "red", "raised": "red", "wrong": "yellow", "note": "dim",
}  # fmt: skip
"""Outcome or severity in `doctor` and `check` → style."""


def _configs(incomplete: str) -> list[str]:
    """Completes presets, YAML files and folders in a shell."""
    folder, slash, _ = incomplete.rpartition("/")
    beside = sorted(Path(folder or slash or ".").glob("[!.]*"))
    there = [path for path in beside if path.is_dir() or path.suffix in (".yaml", ".yml")]
    names = [f"{folder}{slash}{path.name}{'/' if path.is_dir() else ''}" for path in there]
    return [name for name in (*names, *(preset.name for preset in list_presets())) if name.startswith(incomplete)]


_CONFIG = "The config file (`stagecoach init` writes one), or a name of `stagecoach presets`."
ConfigArgument = Annotated[Path, typer.Argument(help=_CONFIG, autocompletion=_configs)]


@app.command(epilog=example("stagecoach presets"))
def presets(as_json: Json = False) -> None:
    """List the configs that come with Stagecoach; `stagecoach train NAME` takes one, `config NAME` prints it."""
    from rich.table import Table

    table = Table("preset", "about")
    for preset in (found := list_presets()):
        table.add_row(preset.name, preset.about)
    console.json(found) if as_json else console.print(table)


@app.command(epilog=example("stagecoach init my-run.yaml --algorithm sac"))
def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("stagecoach.yaml"),
    algorithm: Annotated[
        str | None, typer.Option(metavar="NAME", help="Begin with this algorithm, its fields and its defaults.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Write all fields with their explanations.")] = False,
) -> None:
    """Write a commented config to start from; an existing file is left as it is."""
    from stagecoach.coordinator.cli.commented_config import commented_config, short_config

    text = commented_config(algorithm or "ppo") if all_ else short_config(algorithm)
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise RunExists(f"{path.absolute()} exists; choose another name") from None
    except OSError as error:
        raise UserError(f"cannot write {path.absolute()}: {error.strerror or error}") from None
    console.print(f"wrote {path}; start it with: stagecoach train {path}")


@app.command(epilog=example("stagecoach config examples/cartpole.yaml --set seed=3"))
def config(
    path: Annotated[
        Path | None, typer.Argument(help="A config file; without one, the schema.", autocompletion=_configs)
    ] = None,
    set_: Sets = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of all fields.")] = False,
) -> None:
    """Print the resolved config (file, environment and --set put together), or the schema."""
    from stagecoach.shared.config.loading import dump_config, load_config
    from stagecoach.shared.config.run_config import Config

    if schema or path is None:
        console.json(Config.model_json_schema())
    else:
        print(dump_config(load_config(path, set_ or ())), end="")


@app.command(epilog=example("stagecoach doctor examples/cartpole.yaml"))
def doctor(
    path: Annotated[
        Path | None, typer.Argument(help="Check what this config needs, too.", autocompletion=_configs)
    ] = None,
    set_: Sets = None,
    as_json: Json = False,
) -> None:
    """Check Redis, store, Ray, versions and permissions, with remedies and warnings of open access."""
    from stagecoach.coordinator.lifecycle.doctor import examine
    from stagecoach.shared.config.loading import load_config

    path = config_file(path) if path else None
    extend_imports([os.getcwd(), *([str(path.resolve().parent)] if path else [])])
    findings = []
    for finding in examine(load_config(path, set_ or ()) if path else None):
        findings.append(finding)
        if not as_json:
            shown = "FAIL" if finding.outcome == "fail" else finding.outcome
            console.print(f"{shown:<4}", style=_STYLES[finding.outcome], end="")
            console.text(f" {finding.name}: {finding.text}")
    if as_json:
        console.json([finding.as_dict() for finding in findings])
    if not all(finding.ok for finding in findings):
        raise typer.Exit(Exit.FAILED)


@app.command(epilog=example("stagecoach check own_environment:make --kwargs '{\"length\": 12}'"))
def check(
    environment: Annotated[str, typer.Argument(metavar="ENV|CONFIG", help="An id, module:factory, or a config file.")],
    steps: Annotated[int, typer.Option(min=1, help="Random steps, in as many episodes as that takes.")] = 300,
    seed: Annotated[int, typer.Option(min=0, help="Of its first episode, and of the actions.")] = 0,
    deadline: Annotated[float, typer.Option(min=0.1, help="Seconds that one call may take.")] = 30.0,
    kwargs: Annotated[
        str | None, typer.Option(metavar="JSON", help="Keyword arguments of the environment or the factory.")
    ] = None,
    api: Annotated[str | None, typer.Option(help="gymnasium or pettingzoo; by default what it is.")] = None,
    native: Annotated[bool, typer.Option("--native", help="Step its own vectorized version, too.")] = False,
    as_json: Json = False,
) -> None:
    """Step an environment in a separate process and list its defects: interface, shapes, dtypes, bounds, NaN, hangs,
    crashes, ignored seeds. Exit code 2 if there are any."""
    from stagecoach.coordinator.diagnostics.environment_trial import try_environment

    config, alone = _config(environment, kwargs, {"api": api, "vectorization": "native" if native else None})
    if config.environment.api == "external":
        _refuse_external(config)
    trial = try_environment(config, steps, seed, deadline, whole=True, alone=alone, any_api=alone and api is None)
    if trial.error is None and trial.description is not None:
        from stagecoach.coordinator.lifecycle.validation import check_description

        if alone:
            policies = dict.fromkeys(trial.description.policies, config.policies["default"])
            config = config.model_copy(update={"policies": policies})
        try:
            check_description(config, trial.description)
        except UserError as error:
            trial = replace(trial, error=error)
    if as_json:
        console.json(trial.as_dict())
    else:
        _print(config.environment.id, trial, steps)
    if not trial.fine:
        raise typer.Exit(Exit.REFUSED)


def _refuse_external(config: "Config") -> NoReturn:
    """Checks the spaces, then raises `UserError`: the environment is in other programs."""
    from stagecoach.coordinator.lifecycle.validation import check_description
    from stagecoach.rollout_worker.environments.description import describe_environment

    check_description(config, describe_environment(config))
    raise UserError(
        "environment.api is external: clients have the environment, and `check` cannot step it (its spaces are valid); "
        "test a client with `stagecoach gateway conformance -- COMMAND`, and Redis, store and Ray with "
        "`stagecoach doctor CONFIG`"
    )


def _config(environment: str, kwargs: str | None, fields: dict[str, Any]) -> "tuple[Config, bool]":
    """Loads the config file, or wraps a lone environment in a config; returns whether it was alone."""
    from stagecoach.shared.config.loading import load_config, parse_config

    path = Path(environment)
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        given |= {"kwargs": json.loads(kwargs)} if kwargs is not None else {}
    except ValueError as error:
        raise ConfigError(f"--kwargs {kwargs!r} is not JSON ({error}); expected such as '{{\"length\": 12}}'") from None
    if names_config(environment):
        path = config_file(path)
        extend_imports([os.getcwd(), str(path.resolve().parent)])
        return load_config(path, [f"environment.{name}={json.dumps(value)}" for name, value in given.items()]), False
    extend_imports([os.getcwd()])
    return parse_config({"environment": {"id": environment} | given, "stop_at": {"updates": 1}}), True


def _print(name: str, trial: "Trial", steps: int) -> None:
    if trial.description is not None:
        for agent, policy_id in trial.description.agents.items():
            spaces = trial.description.policies[policy_id]
            console.text(f"agent {agent}: {_leaves(spaces.observation)} → {_leaves(spaces.action)}")
    if trial.error is not None:
        console.print(f"fatal   {trial.error}", style="red", highlight=False, soft_wrap=True)
    for problem in trial.problems:
        console.print(f"{problem.severity:<7} {problem.found}", style=_STYLES[problem.severity], soft_wrap=True)
        console.text(f"        expected {problem.expected}; {problem.remedy}")
    if trial.stack:
        console.text("where it hangs, innermost first:", trial.stack.rstrip())
    count = sum(problem.severity != "note" for problem in trial.problems) + (trial.error is not None)
    wrong = f"{counted(count, 'thing')} {'are' if count > 1 else 'is'} wrong"
    fine = f"nothing is wrong in {counted(steps, 'step')}"
    console.text(f"{name}: {wrong if count else fine}")


def _leaves(space: Any) -> str:
    parts = []
    for leaf in space.leaves:
        size = f"of {', '.join(map(str, leaf.nvec))}" if leaf.nvec else str(leaf.shape or "")
        parts.append((leaf.path or leaf.kind, size, str(leaf.dtype), "(mask)" if leaf.mask else ""))
    return ", ".join(" ".join(filter(None, part)) for part in parts)
