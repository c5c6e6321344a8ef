"""The commands about configs: `presets`, `init`, `config` and `doctor`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli_options import Json, Sets, configs, console, example, print_json
from shared.errors import RunExists, UserError

app = typer.Typer()


@app.command(epilog=example("stagecoach presets"))
def presets(as_json: Json = False) -> None:
    """List the configs that come with Stagecoach; `stagecoach train NAME` takes one, `config NAME` prints it."""
    from rich.table import Table

    from coordinator.presets import list_presets

    found = list_presets()
    if as_json:
        print_json([{"name": preset.name, "about": preset.about, "path": str(preset.path)} for preset in found])
        return
    table = Table("preset", "about")
    for preset in found:
        table.add_row(preset.name, preset.about)
    console.print(table)


@app.command(epilog=example("stagecoach init my-run.yaml"))
def init(path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("stagecoach.yaml")) -> None:
    """Write a commented config to start from; an existing file is left as it is."""
    from coordinator.config_docs import commented_config

    try:
        with path.open("x") as file:
            file.write(commented_config())
    except FileExistsError:
        raise RunExists(f"{path} exists; choose another name") from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}") from None
    console.print(f"wrote {path}; start it with: stagecoach train {path}")


@app.command(epilog=example("stagecoach config examples/cartpole.yaml --set seed=3"))
def config(
    path: Annotated[
        Path | None, typer.Argument(help="A config file; without one, the schema.", autocompletion=configs)
    ] = None,
    set_: Sets = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of all fields.")] = False,
) -> None:
    """Print the resolved config (file, environment and --set put together), or the schema."""
    from coordinator.presets import config_file
    from shared.config import Config
    from shared.config_sources import dump_config, load_config

    if schema or path is None:
        print_json(Config.model_json_schema())
    else:
        print(dump_config(load_config(config_file(path), set_ or ())), end="")


@app.command(epilog=example("stagecoach doctor examples/cartpole.yaml"))
def doctor(
    path: Annotated[
        Path | None, typer.Argument(help="Check what this config needs, too.", autocompletion=configs)
    ] = None,
    set_: Sets = None,
    as_json: Json = False,
) -> None:
    """Check Redis, store, Ray, versions and permissions, say what to do about what fails, and warn of what is open."""
    from coordinator.doctor import examine
    from coordinator.presets import config_file
    from shared.config_sources import load_config
    from shared.user_code import extend_imports

    path = config_file(path) if path else None
    extend_imports([os.getcwd(), *([str(path.resolve().parent)] if path else [])])
    findings = []
    for finding in examine(load_config(path, set_ or ()) if path else None):
        findings.append(finding)
        if not as_json:
            shown, style = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}[
                finding.outcome
            ]
            console.print(shown, style=style, end="")
            console.print(f" {finding.name}: {finding.text}", highlight=False, soft_wrap=True)
    if as_json:
        print_json([finding.as_dict() for finding in findings])
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)
