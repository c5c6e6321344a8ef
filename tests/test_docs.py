"""The documents say what the code does: commands, fields, metrics, waits, keys, dependencies, places and links.

Each thing that a document must name is collected from the product itself; each name that a document uses is looked up.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import yaml
from pydantic import TypeAdapter

from coordinator import cli_checkpoints
from coordinator.cli import app
from coordinator.config_docs import commented_config, config_markdown
from shared.algorithm_configs.registry import ALGORITHMS
from shared.config_sources import load_config, parse_config
from shared.exploration_config import ExplorationConfig, ExplorationField
from shared.fragment import REASONS
from shared.redis_keys import RunKeys
from shared.schedules import Schedule, ScheduleField
from shared.scripts import PUSH
from trainer_node import figures, off_policy_evaluation
from trainer_node.algorithms import cloning, registry
from trainer_node.reward_signals import signals

ROOT = Path(__file__).parent.parent
PRODUCT = ("coordinator", "rollout_worker", "trainer_node", "shared")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
SIGNAL = r"(?:rollout|environment|train|time|policy|wait)/"

every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def code_spans(text: str) -> list[str]:
    """What stands in `…` outside of fenced blocks, line breaks within taken out."""
    return [
        " ".join(span.split()) for span in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    ]


def without_dotted_tail(place: str) -> tuple[str, str]:
    """`a/b.py: Class.method` → file and name; the name is empty for a file alone."""
    path, _, name = place.partition(": ")
    return path, name


def metric_names(module_file: str) -> set[str]:
    """Every metric that a module writes; `environment/<name>` where the last part is not fixed."""
    names = set()
    for node in ast.walk(ast.parse(Path(module_file).read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "<name>" for part in node.values]
            names.add("".join(str(part) for part in parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return {name for name in names if re.fullmatch(SIGNAL + r"[\w<>]+", name)}


def metrics_of(algorithm: str) -> set[str]:
    """What an algorithm's class and its bases write."""
    module = importlib.import_module(f"trainer_node.algorithms.{algorithm}")
    made: type = getattr(module, registry._BUILT_IN[algorithm])
    files = [str(sys.modules[base.__module__].__file__) for base in made.__mro__ if base.__module__ != "builtins"]
    return set().union(*(metric_names(file) for file in files if "trainer_node" in file))


def explained_in(page: str) -> set[str]:
    """The metrics that have a line in a table of the page."""
    return set(re.findall(rf"^\| `({SIGNAL}[\w<>]+)` \|", text_of(page), re.MULTILINE))


def cli_commands() -> set[str]:
    groups = {str(group.name) for group in app.registered_groups}
    return groups | {str(item.name or item.callback.__name__) for item in app.registered_commands if item.callback}


def checkpoint_commands() -> set[str]:
    commands = cli_checkpoints.app.registered_commands
    return {str(item.name or item.callback.__name__) for item in commands if item.callback}


def definitions(path: Path) -> set[str]:
    """Functions, classes, methods and module-level names of a module, methods as `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def named_waits() -> Iterator[str]:
    """The names that roles give to their waits: literals at `waiting(…)`, and the values of a `_WAITS` table."""
    for package in ("rollout_worker", "trainer_node"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "waiting":
                    if isinstance(node.args[0], ast.Constant):
                        yield str(node.args[0].value)
                    else:
                        assert ast.unparse(node.args[0]).startswith("_WAITS["), ast.unparse(node)
                elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_WAITS":
                    yield from ast.literal_eval(node.value).values()


def dependencies() -> dict[str, str]:
    """Distribution → where it is asked for."""
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    groups = {"Runtime": project["dependencies"], **project["optional-dependencies"]}
    return {re.split(r"[\[<>=;! ]", item)[0]: group for group, items in groups.items() for item in items}


def test_config_md_is_what_the_models_say() -> None:
    assert text_of("docs/CONFIG.md") == config_markdown(), "run `make docs`"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_config_loads(path: Path) -> None:
    assert load_config(path, environ={}).stop_at.mean_return is not None or path.stem == "breakout"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_no_example_goes_on_when_its_learning_rate_has_come_to_0(path: Path) -> None:
    config = load_config(path, environ={})
    rate = getattr(config.algorithm, "learning_rate", None)
    if isinstance(rate, Schedule) and rate.over is not None and rate.end == 0 and rate.over.unit == "env_steps":
        assert (config.stop_at.env_steps or 0) <= rate.over.amount


def test_there_are_the_examples_that_the_readme_promises() -> None:
    assert {"cartpole", "own_environment"} <= {path.stem for path in EXAMPLES}


def test_the_yaml_in_the_readme_is_a_config() -> None:
    """Each block on its own, with what it leaves out."""
    blocks = re.findall(r"```yaml\n(.*?)```", text_of("README.md"), re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        parse_config({"environment": {"id": "CartPole-v1"}, "stop_at": {"updates": 1}} | yaml.safe_load(block))


def test_the_commented_config_holds_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "stagecoach.yaml"
    path.write_text(commented_config())
    written = load_config(path, environ={})
    needed = {"environment": {"id": written.environment.id}, "stop_at": written.stop_at.model_dump(exclude_none=True)}
    assert written == parse_config(needed)


def test_the_readme_names_every_command() -> None:
    named = set(re.findall(r"`stagecoach ([a-z]+)[ `]", text_of("README.md")))
    assert cli_commands() - named == set()
    named = set(re.findall(r"`stagecoach checkpoints ([a-z]+) RUN", text_of("README.md")))
    assert checkpoint_commands() - named == {"list"}


@every_document
def test_every_command_that_is_named_exists(document: Path) -> None:
    named = set(re.findall(r"(?:`|^\s*(?:\$ )?|/bin/)stagecoach ([a-z]+)\b", document.read_text(), re.MULTILINE))
    assert named - cli_commands() == set()


@every_document
def test_every_make_target_that_is_named_exists(document: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", text_of("Makefile"), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z]+)", document.read_text(), re.MULTILINE))
    assert named - targets == set()


@pytest.mark.parametrize(("name", "group"), dependencies().items(), ids=lambda value: str(value))
def test_every_dependency_has_its_line(name: str, group: str) -> None:
    (line,) = [line for line in text_of("docs/DEPENDENCIES.md").splitlines() if line.startswith(f"| `{name}` |")]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert all(cells), f"{name} ({group}): a cell is empty"


def test_no_line_is_about_a_dependency_that_is_gone() -> None:
    described = set(re.findall(r"^\| `([\w-]+)` \|", text_of("docs/DEPENDENCIES.md"), re.MULTILINE))
    assert described - set(dependencies()) == set()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithms_page_explains_what_it_writes_and_nothing_else(algorithm: str) -> None:
    """What all runs write, whatever they learn by, stands on PPO's page."""
    of_all_runs = metric_names(str(figures.__file__)) if algorithm == "ppo" else set()
    assert explained_in(f"docs/algorithms/{algorithm}.md") == metrics_of(algorithm) | of_all_runs


def test_the_page_on_reward_signals_explains_what_they_write_and_nothing_else() -> None:
    files = (ROOT / "trainer_node" / "reward_signals").glob("*.py")
    written = set().union(*(metric_names(str(file)) for file in files))
    names = {name.replace("<name>", signal) for name in written for signal in signals.ORDER}
    assert explained_in("docs/REWARD_SIGNALS.md") == names
    assert {"train/rnd_reward", "train/rnd_loss"} <= names


def test_every_way_to_explore_and_every_schedule_is_written_as_it_is_to_be_written() -> None:
    ways, schedules = text_of("docs/EXPLORATION.md").split("## Schedules")
    found = [yaml.safe_load(span) for span in code_spans(ways) if span.startswith("{kind:")]
    made = [TypeAdapter(ExplorationField).validate_python(section) for section in found]
    kinds = {section.model_fields["kind"].default for section in get_args(ExplorationConfig)}
    assert {section.kind for section in made} == kinds and len(kinds) == 9
    spans = [yaml.safe_load(span) for span in code_spans(schedules) if span.startswith("{kind:") and "start" in span]
    given = {TypeAdapter(ScheduleField).validate_python(section).kind for section in spans}
    assert given == set(get_args(Schedule.model_fields["kind"].annotation))


def test_every_estimate_from_data_is_explained() -> None:
    explained = set(re.findall(r"^\| `(ope/\w+)` \|", text_of("docs/OFFLINE.md"), re.MULTILINE))
    assert explained == {
        node.value
        for node in ast.walk(ast.parse(Path(str(off_policy_evaluation.__file__)).read_text()))
        if isinstance(node, ast.Constant) and str(node.value).startswith("ope/")
    }


def test_every_figure_of_imitation_is_explained() -> None:
    assert explained_in("docs/DEMONSTRATIONS.md") == metric_names(str(cloning.__file__))


def test_the_metrics_are_found_in_the_source() -> None:
    assert {"rollout/ep_rew_mean", "environment/<name>", "wait/<name>_seconds"} <= metric_names(str(figures.__file__))
    assert {"train/policy_loss", "train/grad_norm", "train/clip_fraction"} <= metrics_of("ppo")


def test_the_architecture_names_every_wait() -> None:
    waits = set(named_waits())
    assert {"credit", "experience", "a new checkpoint"} <= waits
    assert waits - set(code_spans(text_of("ARCHITECTURE.md"))) == set()


def test_the_architecture_names_every_redis_key_and_no_other() -> None:
    of_the_run = [value for name, value in vars(RunKeys).items() if isinstance(value, property) and name != "prefix"]
    keys = {str(value.fget(RunKeys("r"))) for value in of_the_run if value.fget}
    keys |= {key[:-2] for key in (RunKeys("r").trail("w"), RunKeys("r").bodies("w"))}
    (listed,) = re.findall(r"The keys are (.*?)\. None", text_of("ARCHITECTURE.md"), re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed)) == {key.removeprefix(RunKeys("r").prefix) for key in keys}


def test_the_architecture_explains_every_reason_for_a_drop() -> None:
    table = set(re.findall(r"^\| `(\w+)` \| ", text_of("ARCHITECTURE.md"), re.MULTILINE))
    assert set(REASONS) <= table


def test_the_architecture_names_every_answer_of_a_push() -> None:
    answers = set(re.findall(r"return '(\w+)'", PUSH))
    assert "stale" in answers
    assert answers - set(code_spans(text_of("ARCHITECTURE.md"))) == set()


@every_document
def test_links_lead_to_files(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text())
    missing = [t for t in targets if "://" not in t and not (document.parent / t).exists()]
    assert missing == []


@every_document
def test_files_and_functions_that_are_named_exist(document: Path) -> None:
    missing = []
    for span in code_spans(document.read_text()):
        path, name = without_dotted_tail(span)
        if not re.fullmatch(r"[\w./]+\.(py|md|yaml|txt|toml)", path) or path.split("/")[0] not in {
            *PRODUCT,
            "tests",
            "docs",
        }:
            continue
        if not (ROOT / path).is_file() or (name and name not in definitions(ROOT / path)):
            missing.append(span)
    assert missing == []


def test_the_architecture_points_at_functions() -> None:
    """So that the test above looks at something."""
    places = [span for span in code_spans(text_of("ARCHITECTURE.md")) if re.match(r"[\w/]+\.py: \w", span)]
    assert "trainer_node/trainer.py: Trainer.run" in places
    assert len(places) > 10


def test_every_promise_names_a_test_that_exists() -> None:
    """That the files and functions exist is looked up with those of all documents."""
    table = text_of("docs/RELIABILITY.md").partition("## What is promised")[2].partition("\n## ")[0]
    promises = [line for line in table.splitlines() if line.startswith("| **")]
    assert len(promises) > 15
    proofs = [re.findall(r"`(tests/[\w/]+\.py): (test_\w+)`", line) for line in promises]
    assert [line for line, found in zip(promises, proofs, strict=True) if not found] == []
    assert all(name in definitions(ROOT / path) for found in proofs for path, name in found)
