"""The documents say what the code does: commands, fields, metrics, waits, keys, dependencies, places and links.

Each thing that a document must name is collected from the product itself; each name that a document uses is looked up.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import json
import re
import statistics
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
import yaml
from pydantic import TypeAdapter

from docs.build_site import AT_ROOT, DOCS, GENERATED, pages_of, site_nav
from docs.config_reference import config_markdown
from stagecoach.coordinator.cli import checkpoints, gateway
from stagecoach.coordinator.cli.app import app
from stagecoach.coordinator.cli.commented_config import commented_config
from stagecoach.coordinator.studies.study_config import StudyConfig
from stagecoach.shared.base.errors import DropReason
from stagecoach.shared.base.user_code import import_object
from stagecoach.shared.config.algorithms.exploration import ExplorationConfig, ExplorationField
from stagecoach.shared.config.algorithms.registry import ALGORITHMS
from stagecoach.shared.config.loading import load_config, parse_config, parse_yaml
from stagecoach.shared.config.schema.section import OWN_KIND, Schedule, ScheduleField, leaves
from stagecoach.shared.experience.fragment import EpisodeRecord
from stagecoach.shared.protocol.keys import TYPES
from stagecoach.shared.protocol.scripts import source
from stagecoach.shared.storage.metric_log import STREAMS
from stagecoach.trainer_node.learning.building_blocks import cloning
from stagecoach.trainer_node.learning.curriculum import Curriculum
from stagecoach.trainer_node.learning.league import League
from stagecoach.trainer_node.learning.reward_signals import reward_signals
from stagecoach.trainer_node.metrics.recorder import evaluation_row
from stagecoach.trainer_node.metrics.update_metrics import of_episodes, spread
from stagecoach.trainer_node.metrics.writers import WRITERS
from tests.support.suite.pages import SHELL, Block, blocks

ROOT = Path(__file__).parent.parent
PRODUCT = ("coordinator", "rollout_worker", "trainer_node", "shared")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.yaml") if path.stem != "tune")  # that is a study
SIGNAL = r"(?:rollout|environment|train|time|policy|wait)/"
COMMAND: Any = typer.main.get_command(app)
COMMAND.commands["checkpoints"].commands = typer.main.get_group(checkpoints.app).commands  # which else come when called
BASE = {"environment": {"id": "CartPole-v1"}, "stop_at": {"updates": 1}}
"""What a config that is a part of one leaves out."""


def offenders(find: Callable[[Path, str], Iterable[str]]) -> list[str]:
    """Findings of a rule in each document and its text."""
    found = [(path, find(path, path.read_text())) for path in DOCUMENTS]
    return [f"{path.relative_to(ROOT)}: {each}" for path, several in found for each in several]


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def code_spans(text: str) -> list[str]:
    """Text in `…` outside of fenced blocks, without line breaks."""
    return [
        " ".join(span.split()) for span in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    ]


def metric_names(source: str, areas: str = SIGNAL) -> set[str]:
    """Every metric that a module or class writes; `environment/<name>` where the last part is not fixed."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "<name>" for part in node.values]
            names.add("".join(str(part) for part in parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return {name for name in names if re.fullmatch(areas + r"(?:[\w<>]+/)*[\w<>]+", name)}


def metrics_of(algorithm: str) -> set[str]:
    """Metrics that an algorithm's class and its bases write."""
    made: type = import_object(ALGORITHMS[algorithm].learner, "algorithm.name")
    bases = [base for base in made.__mro__ if base.__module__.startswith("stagecoach.trainer_node")]
    return set().union(*(metric_names(inspect.getsource(base)) for base in bases))


def explained_in(page: str) -> set[str]:
    """The metrics that have a line in a table of the page."""
    return set(re.findall(rf"^\| `({SIGNAL}[\w<>]+)` \|", text_of(page), re.MULTILINE))


def commands(of: typer.Typer) -> set[str]:
    """Groups and commands of the command line."""
    groups = {str(group.name) for group in of.registered_groups}
    return groups | {str(item.name or item.callback.__name__) for item in of.registered_commands if item.callback}


_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def definitions(path: Path) -> set[str]:
    """Functions, classes, methods and module-level names of a module, methods as `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, _FUNCTIONS | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, _FUNCTIONS)}
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
                    assert isinstance(node.value, ast.Dict)
                    yield from map(ast.literal_eval, node.value.values)


def dependencies() -> dict[str, str]:
    """Distribution → where it is asked for."""
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    groups = {"Runtime": project["dependencies"], **project["optional-dependencies"]}
    return {re.split(r"[\[<>=;! ]", item)[0]: group for group, items in groups.items() for item in items}


def parse_command(words: Sequence[str]) -> None:
    """Parses the arguments of `stagecoach` as the command line does.

    Raises:
        typer._click.exceptions.UsageError: for an unknown command or option, or a missing argument.
    """
    command: Any = COMMAND
    context = command.make_context("stagecoach", list(words))
    while hasattr(command, "resolve_command") and (rest := [*context._protected_args, *context.args]):
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


def check_shell(block: Block) -> None:
    """Checks the syntax, the options of `stagecoach`, and that modules and files of the repository exist."""
    checked = subprocess.run(["bash", "-n"], input=block.script, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    commands = list(block.commands())
    assert commands, "no command"
    for words in commands:
        if Path(words[0]).name == "stagecoach":
            parse_command(words[1:])
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), words
        for word in words:
            if re.fullmatch(r"(?:examples|deploy)/[\w./-]+", word):
                assert (ROOT / word).exists(), word


def check_yaml(block: Block) -> None:
    data = parse_yaml(block.text, block.place)
    if "space" in data:
        StudyConfig.model_validate(data)
    elif not block.not_run:
        parse_config(BASE | data)


def check_plain(block: Block) -> None:
    """Commands belong into a block with a language, where they are checked."""
    command = r"^(?:\$ |stagecoach |make |pip |python |cd |git |import |from \w+ import )"
    assert not re.search(command, block.text, re.MULTILINE), "give the block a language"


CHECKS: dict[str, Callable[[Block], object]] = {
    "python": lambda block: compile(block.text, block.place, "exec"),
    "yaml": check_yaml,
    "json": lambda block: json.loads(block.text),
    "toml": lambda block: tomllib.loads(block.text),
    **dict.fromkeys(SHELL, check_shell),
    "": check_plain,
    **dict.fromkeys(("text", "promql"), lambda block: None),
}


def test_config_md_equals_the_generated_page() -> None:
    assert text_of("docs/reference/config.md") == config_markdown(), "run `make docs`"


def test_exactness_page_lists_all_fields_a_resume_refuses() -> None:
    refused = {path.partition(".")[0] for path in leaves(load_config("cartpole", environ={})._deciding())}
    table = text_of("docs/concepts/what-is-exact.md")
    assert {"seed", "algorithm", "trainer"} <= refused
    assert [name for name in refused if not re.search(rf"`{name}[`.]", table)] == []


def test_config_md_has_defaults_as_yaml() -> None:
    """Python's `None` in a config would be text."""
    defaults = re.findall(r"^\| `[^`]+` \| `([^`]*)` \|", text_of("docs/reference/config.md"), re.MULTILINE)
    assert len(defaults) > 400
    assert [text for text in defaults if re.search(r"\b(None|True|False)\b|\w\(", text)] == []


def test_example_configs_load_and_name_their_scores() -> None:
    configs = {path.stem: load_config(path, environ={}) for path in EXAMPLES}
    assert {"cartpole", "own_environment"} <= configs.keys()
    without = {name for name, config in configs.items() if config.stop_at.mean_return is None}
    assert without <= {"breakout", "league", "simple_spread_mappo", "tictactoe"}
    for name, config in configs.items():
        rate = getattr(config.algorithm, "learning_rate", None)
        if isinstance(rate, Schedule) and rate.over is not None and rate.end == 0 and rate.over.unit == "env_steps":
            assert (config.stop_at.env_steps or 0) <= rate.over.amount, f"{name} goes on when it learns no more"


def own_parts() -> list[str]:
    """Returns the pages about parts of one's own."""
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "how-to").glob("own-*.md"))


@pytest.mark.parametrize("page", own_parts())
def test_page_on_own_part_shows_its_example(page: str) -> None:
    text, example = text_of(page), ROOT / "examples" / Path(page).stem.replace("-", "_")
    for suffix, language in ((".py", "python"), (".yaml", "yaml")):
        assert f"```{language}\n{example.with_suffix(suffix).read_text()}```" in text
    code = [line for line in example.with_suffix(".py").read_text().splitlines() if line.strip()]
    assert len(code) <= 40 and len(re.sub(r"```.*?```", "", text, flags=re.DOTALL).split()) <= 220


@pytest.mark.parametrize(
    "page", [path for path in DOCUMENTS if blocks(path)], ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_blocks_are_valid(page: Path) -> None:
    """test_doc_blocks.py runs them."""
    for block in blocks(page):
        assert block.language in CHECKS, f"{block.place}: no check for {block.language!r}"
        try:
            CHECKS[block.language](block)
        except Exception as error:
            raise AssertionError(f"{block.place}: {error}") from error


def test_named_options_exist() -> None:
    """Those of commands in the text, outside of blocks."""
    unknown = []
    for page in DOCUMENTS:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for span in re.findall(r"`stagecoach ([^`]+)`", text):
            command = COMMAND
            words = span.split()
            while hasattr(command, "commands") and words and words[0] in command.commands:
                command = command.commands[words.pop(0)]
            options = {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
            used = {word.partition("=")[0] for word in re.findall(r"(?<!\S)\[?(--[\w=-]+)", " ".join(words))}
            unknown += [f"{page.name}: {span}: {option}" for option in used - options - {"--help", "--version"}]
    assert unknown == []


def test_nav_has_every_page() -> None:
    listed = list(pages_of(site_nav()))
    existing = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | {*AT_ROOT, GENERATED}
    assert existing - set(listed) == set(), "add a line for it to `nav` in zensical.toml"
    assert sorted(listed) == sorted(existing)


def test_commented_config_holds_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "stagecoach.yaml"
    path.write_text(commented_config())
    written = load_config(path, environ={})
    needed = {"environment": {"id": written.environment.id}, "stop_at": written.stop_at.model_dump(exclude_none=True)}
    assert written == parse_config(needed)


def test_commands_page_names_every_command() -> None:
    page = text_of("docs/reference/commands.md")
    assert commands(app) - set(re.findall(r"`stagecoach ([a-z-]+)[ `]", page)) == set()
    assert commands(checkpoints.app) - set(re.findall(r"`stagecoach checkpoints ([a-z]+) RUN", page)) == {"list"}
    assert commands(gateway.app) == set(re.findall(r"`stagecoach gateway ([a-z]+)", page))


def test_named_commands_and_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    command, target = r"(?:`|^\s*(?:\$ )?|/bin/)stagecoach ([a-z][a-z-]*)\b", r"(?:`|^)make ([a-z-]+)"
    assert offenders(lambda _, text: set(re.findall(command, text, re.MULTILINE)) - commands(app)) == []
    assert offenders(lambda _, text: set(re.findall(target, text, re.MULTILINE)) - targets) == []


def test_every_dependency_has_its_whole_line() -> None:
    lines = [[cell.strip() for cell in line.split("|")] for line in text_of("docs/DEPENDENCIES.md").splitlines()]
    whole = {cells[1] for cells in lines if len(cells) > 3 and all(cells[1:-1])}
    assert [name for name in dependencies() if f"`{name}`" not in whole] == []
    described = set(re.findall(r"^\| `([\w-]+)` \|", text_of("docs/DEPENDENCIES.md"), re.MULTILINE))
    assert described - set(dependencies()) == set(), "these are gone"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithm_pages_explain_exactly_their_metrics(algorithm: str) -> None:
    """Metrics of all runs are on the metrics page."""
    assert {"train/grad_norm"} <= metrics_of("ppo"), "they are found in the source"
    assert explained_in(f"docs/algorithms/{algorithm}.md") == metrics_of(algorithm)


def test_metrics_page_explains_exactly_what_runs_write() -> None:
    files = [*(ROOT / "trainer_node" / "metrics").glob("*.py"), ROOT / "shared" / "storage" / "metric_log.py",
             ROOT / "shared" / "protocol" / "events.py"]  # fmt: skip
    areas = SIGNAL.replace("wait", "wait|parameter|episode|eval|event|fleet|log|time_share")
    written = set().union(*(metric_names(file.read_text(), areas) for file in files))
    some: dict[str, Any] = {"agent_returns": {"<name>": 1.0}, "metrics": {"<name>": 1.0}}
    written |= of_episodes([EpisodeRecord(1.0, 1, True, **some)]).keys()
    written |= spread("rollout/ep_shaped_rew", [1.0]).keys()
    scores = dict.fromkeys(("mean_return", "std_return", "min_return", "max_return", "mean_length", "episodes"), 1.0)
    written |= evaluation_row(
        {
            "version": 1,
            "success_rate": 1.0,
            "agents": {"<name>": 1},
            "metrics": {"<name>": 1},
            "win_rates": {"<name>": 1},
            "match_returns": {"<name>": 1},
        }
        | scores
    ).keys()
    written |= {"eval/confirmation/<name>", *(f"{fold.name}/<name>/<name>" for fold in (League, Curriculum))}
    explained = set[str]()
    for cell in re.findall(
        r"^\| (`[^|]*`) \|", text_of("docs/reference/metrics.md").partition("## In the store")[0], re.MULTILINE
    ):
        first, *others = re.findall(r"`([^`]+)`", cell)
        explained |= {first, *(first.rpartition("_")[0] + each if each[0] == "_" else each for each in others)}
    histograms = {"rollout/ep_rew", "rollout/ep_len"}
    assert explained - set(STREAMS) - histograms == written - histograms - {"rollout/ep_shaped_rew"}
    assert histograms <= explained >= set(STREAMS) and {"fleet/fps", "time_share/<name>/<name>"} <= written
    assert WRITERS.keys() <= set(
        re.findall(r"^    - (?:path: )?([a-z]+)\b", text_of("docs/how-to/trackers.md"), re.MULTILINE)
    )


def test_pages_explain_metrics_of_imitation_and_estimates() -> None:
    assert explained_in("docs/guides/demonstrations.md") == metric_names(inspect.getsource(cloning))
    explained = set(re.findall(r"^\| `(ope/\w+)` \|", text_of("docs/guides/offline.md"), re.MULTILINE))
    assert explained == set(re.findall(r'"(ope/\w+)"', text_of("trainer_node/learning/off_policy_evaluation.py")))


def test_reward_signals_page_explains_exactly_their_metrics() -> None:
    files = (ROOT / "trainer_node" / "learning" / "reward_signals").glob("*.py")
    written = set().union(*(metric_names(file.read_text()) for file in files))
    names = {name.replace("<name>", signal) for name in written for signal in reward_signals.ORDER}
    assert explained_in("docs/guides/reward-signals.md") == names
    assert {"train/rnd_reward", "train/rnd_loss"} <= names


def test_exploration_and_schedule_snippets_are_valid() -> None:
    ways, schedules = text_of("docs/guides/exploration.md").split("## Schedules")
    found = [yaml.safe_load(span) for span in code_spans(ways) if span.startswith("{kind:")]
    made = [TypeAdapter(ExplorationField).validate_python(section) for section in found]
    kinds = {section.model_fields["kind"].default for section in get_args(ExplorationConfig)}
    assert {OWN_KIND if ":" in section.kind else section.kind for section in made} == kinds and len(kinds) == 10
    spans = [yaml.safe_load(span) for span in code_spans(schedules) if span.startswith("{kind:") and "start" in span]
    given = {TypeAdapter(ScheduleField).validate_python(section).kind for section in spans}
    assert given == set(get_args(Schedule.model_fields["kind"].annotation))


def test_recovery_page_names_every_wait() -> None:
    waits = set(named_waits())
    assert {"credit", "experience", "a new checkpoint"} <= waits
    assert waits - set(code_spans(text_of("docs/internals/recovery.md"))) == set()


def test_protocol_page_names_keys_drop_reasons_and_replies() -> None:
    page = text_of("docs/internals/protocol.md")
    (listed,) = re.findall(r"The keys are (.*?)\. None", page, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed)) == set(TYPES)
    assert set(DropReason) <= set(re.findall(r"^\| `(\w+)` \| ", page, re.MULTILINE))
    replies = set(re.findall(r"return '(\w+)'", source("push").text))
    assert "stale" in replies
    assert replies - set(code_spans(page)) == set()


def test_readme_has_the_measured_figures() -> None:
    """Of the pages that it links."""

    def median(page: str, what: str, against: str = "") -> str:
        measures = json.loads((ROOT / "docs" / "benchmarks" / f"{page}.json").read_text())["measures"]
        samples = {measure["what"]: measure["samples"] for measure in measures}
        compared = samples[against] if against else [1.0] * len(samples[what])
        return f"{statistics.median(a / b for a, b in zip(samples[what], compared, strict=True)):.1f}"

    text = " ".join((ROOT / "README.md").read_text().split())
    where = "CartPole-v1, SyncVectorEnv: "
    for way in ("Stagecoach PPO, policy lag 1", "Stagecoach PPO, lockstep"):
        for peer in ("Stable-Baselines3 PPO", "RLlib PPO"):
            assert f"**{median('peers', where + way, where + peer)} ×**" in text, (way, peer)
    for what in ("trainer, p50", "worker-0, p50"):
        assert f"**{median('recovery', what)} s**" in text, what


def test_links_lead_to_files() -> None:
    def missing(document: Path, text: str) -> list[str]:
        targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
        return [target for target in targets if "://" not in target and not (document.parent / target).exists()]

    assert offenders(missing) == []


def test_files_and_functions_that_are_named_exist() -> None:
    place = re.compile(rf"((?:{'|'.join((*PRODUCT, 'tests', 'docs'))})/[\w./-]+\.(?:py|md|yaml|txt|toml))(?:: (.+))?")

    def missing(_: Path, text: str) -> Iterator[str]:
        for path, name in (found.groups() for span in code_spans(text) if (found := place.fullmatch(span))):
            if not (ROOT / path).is_file() or (name and name not in definitions(ROOT / path)):
                yield f"{path}: {name}"

    assert offenders(missing) == []
    assert len([span for span in code_spans(text_of("ARCHITECTURE.md")) if place.fullmatch(span)]) > 10


def test_every_promise_names_a_test_that_exists() -> None:
    """Another test checks that the files and functions exist."""
    table = text_of("docs/operations/reliability.md").partition("## What is promised")[2].partition("\n## ")[0]
    promises = [line for line in table.splitlines() if line.startswith("| **")]
    assert len(promises) > 15
    proofs = [re.findall(r"`(tests/[\w/]+\.py): (test_\w+)`", line) for line in promises]
    assert [line for line, found in zip(promises, proofs, strict=True) if not found] == []
    assert all(name in definitions(ROOT / path) for found in proofs for path, name in found)
