"""Where the config comes from: file < environment < command line, strict YAML, and the nearest right key by name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_origin

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.config.algorithms.off_policy import SACConfig
from stagecoach.shared.config.algorithms.registry import ALGORITHMS
from stagecoach.shared.config.loading import dump_config, load_config, parse_config
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.schema.validation import field_paths, section_tag, sections_in
from tests.conftest import minimal_config

BASE = """
environment: {id: CartPole-v1, num_envs: 2}
rollout: {workers: 3, fragments_per_update: 4, fragment_steps: 8}
stop_at: {updates: 5}
"""

EXAMPLES = Path(__file__).parents[3] / "examples"
WriteConfig = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> WriteConfig:
    """`write(text)` → the path of a config file."""

    def write_it(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path

    return write_it


def refused(path: Path | None, overrides: list[str] | None = None, environ: dict[str, str] | None = None) -> str:
    """The error text, which is one line."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides or [], environ or {})
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_config_sources_follow_precedence(write: WriteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    path, environ = write(BASE), {"STAGECOACH__ROLLOUT__WORKERS": "5", "PATH": "/bin"}
    for file, overrides, variables, workers in (
        (None, ["environment.id=A-v0", "stop_at.updates=1"], {}, 2),
        (path, [], {}, 3),
        (path, [], environ, 5),
        (path, ["rollout.workers=7"], environ, 7),
        (path, ["rollout.workers=7", "rollout.workers=8"], environ, 8),
    ):
        config = load_config(file, overrides, variables)
        assert config.rollout.workers == workers
    assert (config.rollout.fragment_steps, config.environment.num_envs) == (8, 2)
    monkeypatch.setenv("STAGECOACH__SEED", "41")
    assert [load_config(path).seed, load_config(path, environ={}).seed] == [41, 1]


def test_config_is_loaded_from_whatever_names_it(write: WriteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fields = write(BASE), {"rollout.workers": np.int64(7), "policies.default.hidden_sizes": (8, 8)}
    expected = load_config(path, ["rollout.workers=7", "policies.default.hidden_sizes=[8, 8]"], {})
    monkeypatch.chdir(path.parent)
    for source in (path, str(path), path.name, yaml.safe_load(BASE), load_config(path, environ={})):
        assert load_config(source, fields, {}) == expected
    assert load_config("cartpole", "seed=5", {}) == load_config(EXAMPLES / "cartpole.yaml", {"seed": 5}, {})
    Path("cartpole").mkdir()
    assert load_config("cartpole", environ={}).environment.id == "CartPole-v1"
    monkeypatch.setenv("STAGECOACH__SEED", "41")
    assert [load_config(source).seed for source in (path, yaml.safe_load(BASE), expected)] == [41, 41, 1]


@pytest.mark.parametrize(
    "path", sorted({*EXAMPLES.glob("*.yaml")} - {EXAMPLES / "tune.yaml"}), ids=lambda path: path.stem
)
def test_replace_keeps_what_it_does_not_change(path: Path) -> None:
    config = load_config(path, environ={})
    assert config.replace({}) == config
    changed = config.replace("seed", 77)
    assert (changed.seed, dump_config(changed.replace({"seed": config.seed}))) == (77, dump_config(config))


def test_replaced_algorithm_brings_its_own_defaults() -> None:
    sections = {"environment": {"id": "Pendulum-v1"}, "stop_at": {"updates": 1}, "rollout": {"fragment_steps": 16}}
    ppo, sac = (load_config(sections, {"algorithm": name}, {}) for name in ("ppo", "sac"))
    assert ppo.replace("algorithm", "sac") == sac and sac.replace({"algorithm": {"name": "ppo"}}) == ppo
    assert sac.replace("algorithm", SACConfig(tau=0.01)).algorithm.model_dump()["tau"] == 0.01


@pytest.mark.parametrize(
    "text", ["1e-3", "1E-3", "1.e-3", "10.e-4", "1e+0 ", "0.001", "{kind: linear, start: 1e-3, over: 10 updates}"]
)
def test_numbers_may_have_exponents(text: str, write: WriteConfig) -> None:
    file, value = write(BASE + f"algorithm: {{learning_rate: {text}}}"), 1.0 if "+" in text else 1e-3
    assert load_config(file, [], {}).algorithm.learning_rate.start == value
    assert load_config(write(BASE), [f"algorithm.learning_rate={text}"], {}).algorithm.learning_rate.start == value


def test_overrides_are_yaml_values(write: WriteConfig) -> None:
    overrides = [
        "policies.default.hidden_sizes=[32, 16]",
        "metrics.writers=[jsonl, {path: csv}]",
        "evaluation.kwargs.render_mode=rgb_array",
        "evaluation.kwargs.since=2020-01-01",
        "environment.kwargs={a: 1, b: 'x=y'}",
        "store.endpoint_url=",
        "checkpoint.every=5 episodes",
    ]
    config = load_config(write(BASE), overrides, {})
    assert config.policies["default"].hidden_sizes == (32, 16)
    assert [writer.path for writer in config.metrics.writers] == ["jsonl", "csv"]
    assert config.evaluation.kwargs == {"render_mode": "rgb_array", "since": "2020-01-01"}
    assert config.environment.kwargs == {"a": 1, "b": "x=y"}
    assert config.store.endpoint_url is None
    assert str(config.checkpoint.every) == "5 episodes"


def test_environment_variables_reach_every_field() -> None:
    for path in field_paths(Config):
        environ = {"STAGECOACH__" + path.replace(".", "__").upper(): "{no such thing: 1}"}
        if path.startswith("algorithm.") and path != "algorithm.name":
            field = path.removeprefix("algorithm.")
            owner = next(name for name, section in ALGORITHMS.items() if field in field_paths(section))
            environ |= {"STAGECOACH__ALGORITHM__NAME": owner}
            part, _, leaf = field.partition(".")
            having = [one for one in sections_in(ALGORITHMS[owner].model_fields[part].annotation) if leaf]
            if tags := [section_tag(one) for one in having if leaf in field_paths(one)]:
                environ |= {f"STAGECOACH__ALGORITHM__{part}__{tags[0][0]}".upper(): tags[0][1]}
        assert f"unknown key {path}; " not in refused(None, environ=environ)


WRONG: tuple[Any, ...] = (
    "20k", "", None, float("inf"), float("nan"), float("-inf"), -1, 0, 1.5, 10**400, True, "x", [1], [1, 2, 3],
    {}, {"a": 1}, {1: 2}, [[]], "\udc00",
)  # fmt: skip
"""What no field has in mind, of every type that YAML has."""
PYDANTIC = re.compile(
    r"Input |Field required|valid (dict|string|number|integer)|should |[Uu]nable to|instance of|<class|_type"
)


def paths_below(model: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """Every field, also those of sections within mappings and of all kinds that one may be of."""
    for name, field in model.model_fields.items():
        yield (name,)
        between = ("default",) if get_origin(field.annotation) is dict else ()
        for below in sections_in(field.annotation) if name != "algorithm" else ():
            yield from ((name, *between, *rest) for rest in paths_below(below))


def test_errors_of_every_field_are_plain() -> None:
    places = dict.fromkeys(paths_below(Config), "ppo")
    places |= {("algorithm", *path): name for name, model in ALGORITHMS.items() for path in paths_below(model)}
    told: list[tuple[tuple[str, ...], Any, str]] = []
    for (path, name), value in itertools.product(places.items(), WRONG):
        data: dict[str, Any] = {"environment": {"id": "X"}, "stop_at": {"updates": 1}, "algorithm": {"name": name}}
        section = data
        for key in path[:-1]:
            section = section.setdefault(key, {})
        section[path[-1]] = value
        try:
            parse_config(data)
        except ConfigError as error:
            told.append((path, value, str(error)))
    assert len(places) > 250 and len(told) > 2500  # it did meet them
    assert [item for item in told if PYDANTIC.search(item[2]) or len(item[2]) > 1000] == []


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.workers", "--set expects section.field=value, found 'rollout.workers'"),
        ("=3", "--set expects section.field=value"),
        ("seed.deep=3", "--set seed.deep=3: seed is a value (1), not a section with deep; set seed itself"),
        ("seed=[1", "seed=[1: not a YAML value"),
        ("rollout.=3", "unknown key rollout."),
        ("environment.wrappers=[{path: a:B, kwarg: {}}]", ".0.kwarg; did you mean environment.wrappers.0.kwargs?"),
        ("ray.zzz=1", "unknown key ray.zzz; known here: address, num_cpus, resources"),
        ("algorithm.target_entropy=1", "ppo has no such field, but cql, sac, tqc: is algorithm.name right?"),
        ("algorithm={name: dqn, replay_buffer: {kind: null}}", "hindsight, balanced, module:Class, found nothing"),
        ("algorithm={name: dqn, replay_buffer: {strategy: final}}", "uniform has no such field, but hindsight: is"),
        ("algorithm={name: dqn, replay_buffer: {kind: unifrom}}", "found 'unifrom'"),
        ("algorithm={name: dqn, exploration: greedy}", "algorithm.exploration.kind must be one of"),
        (
            "algorithm={name: dqn, replay_buffer: {kind: uniform, capcity: 5}}",
            "unknown key algorithm.replay_buffer.cap",
        ),
        ("algorithm={name: dqn, replay_buffer: {kind: uniform, capacity: -5}}", "capacity: expected 1 or more, found"),
        ("algorithm.learning_rate=.inf", "algorithm.learning_rate: expected a finite number, found inf; give such a"),
        ("rollout.workers=1e400", "rollout.workers: expected a finite number, found inf; give such a number"),
        (f"algorithm.learning_rate=1{'0' * 400}", "algorithm.learning_rate: expected a"),
        (f"seed={'1' * 5000}", "seed=1111"),
        ("rollout.fragment_steps=20k", "rollout.fragment_steps: expected a whole number, found '20k'; write 20000"),
        ("stop_at.env_steps=1.5M", "stop_at.env_steps: expected a whole number, found '1.5M'; write 1500000"),
        ("stop_at.hours=1,000", "stop_at.hours: expected a number, found '1,000'; write 1000"),
        ("runs_dir=''", "runs_dir: expected a folder, found ''; name one, or remove the line for `runs`"),
        ("runs_dir=", "runs_dir: expected a path, found nothing; give a value or remove the line"),
        ("rollout=", "rollout: expected a section, as in {name: value}, found nothing; give a value or remove the"),
        ("environment.id=''", "environment.id: expected text of 1 or more characters, found ''"),
        (
            "league.fixed={a/b: random}",
            "league.fixed.a/b: expected a name of letters, digits, - and _ that begins with a letter, found",
        ),
        ("environment.kwargs={1: 2}", "environment.kwargs.1: expected keys that are text, found 1; put it in quotes"),
        ("policies.default.reward_clip=[1]", "policies.default.reward_clip: expected 2 values, found [1]"),
        ("policies.default.hidden_sizes=[1000000000]", "hidden_sizes.0: expected 65536 or less, found 1000000000"),
        ("algorithm=", "algorithm.name must be one of a2c, appo, bc, cql, ddpg, dqn, impala, iql, ppo, "),
    ],
    ids=lambda text: text[:40],
)
def test_wrong_value_error_has_remedy(override: str, said: str, write: WriteConfig) -> None:
    text = refused(write(BASE + "seed: 1"), [override])
    assert said in text and len(text) < 450


@pytest.mark.parametrize("name", ["dqn", "rainbow", "r2d2", "sac", "td3"])
def test_replay_buffer_has_default_kind(name: str, write: WriteConfig) -> None:
    """What it does not say is as in the algorithm's default, also what differs from the kind's own."""
    before, after = (
        load_config(write(BASE), [f"algorithm={{name: {name}{more}}}"], {}).algorithm.model_dump()["replay_buffer"]
        for more in ("", ", replay_buffer: {capacity: 5000}")
    )
    assert after == before | {"capacity": 5000} != before


def test_schema_accepts_replay_buffer_without_kind() -> None:
    """With `oneOf` an editor would mark it as wrong, since it fits several sections."""
    found = Config.model_json_schema()["$defs"]["DQNConfig"]["properties"]["replay_buffer"]
    assert "oneOf" not in found and len(found["anyOf"]) == 5


def test_exploration_has_default_kind(write: WriteConfig) -> None:
    found = load_config(write(BASE), ["algorithm={name: dqn, exploration: {epsilon: 0.25}}"], {}).algorithm.acting
    assert (found.kind, found.model_dump()["epsilon"]["start"]) == ("epsilon_greedy", 0.25)


@pytest.mark.parametrize(
    ("section", "overrides", "environ", "way"),
    [
        ("{name: ppo, epochs: 3}", ["algorithm.name=dqn"], {}, "algorithm={name: dqn}"),
        ("{epochs: 3}", [], {"STAGECOACH__ALGORITHM__NAME": "dqn"}, "algorithm={name: dqn}"),
        (
            "{name: dqn, replay_buffer: {kind: hindsight, strategy: final}}",
            ["algorithm.replay_buffer.kind=uniform"], {}, "algorithm.replay_buffer={kind: uniform}",
        ),
    ],
)  # fmt: skip
def test_changed_section_name_error_has_remedy(
    section: str, overrides: list[str], environ: dict[str, str], way: str, write: WriteConfig
) -> None:
    path = write(f"{BASE}algorithm: {section}")
    text = refused(path, overrides, environ)
    assert text.startswith("unknown key algorithm.") and "alone keeps the section's other fields" in text
    assert text.endswith(f"--set '{way}' starts it from its defaults")
    load_config(path, [way], {})


def test_config_error_lists_all_mistakes(write: WriteConfig) -> None:
    text = refused(write(BASE), ["rollout.workrs=1", "algorithm.gamma=2", "sed=1"])
    assert all(word in text for word in ("rollout.workers", "algorithm.gamma", "did you mean seed?"))


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("enviroment.id", "environment"),
        ("rollout.workrs", "rollout.workers"),
        ("rollout.fragment_step", "rollout.fragment_steps"),
        ("algorithm.learningrate", "algorithm.learning_rate"),
        ("algorithm.learning_rate.strat", "algorithm.learning_rate.start"),
        ("policies.default.hiden_sizes", "policies.default.hidden_sizes"),
        ("stop.updates", "stop_at"),
        ("checkpoint.keep_lats", "checkpoint.keep_last"),
        ("seeed", "seed"),
        ("workers", "rollout.workers"),
        ("redis.endpoint_url", "store.endpoint_url"),
    ],
)
def test_unknown_key_error_suggests_nearest_key(wrong: str, right: str, write: WriteConfig) -> None:
    path = write(BASE)
    top = wrong.split(".")[0]
    shown = wrong if top in Config.model_fields else top
    expected = f"unknown key {shown}; did you mean {right}?"
    assert expected in refused(path, [f"{wrong}=1"])
    assert expected in refused(path, environ={"STAGECOACH__" + wrong.replace(".", "__").upper(): "1"})
    nested: Any = 1
    for part in reversed(wrong.split(".")):
        nested = {part: nested}
    assert expected in refused(write(yaml.safe_dump(nested)))


def test_environment_variable_with_few_underscores_is_rejected(write: WriteConfig) -> None:
    for name, right in {
        "STAGECOACH_ROLLOUT__WORKERS": "STAGECOACH__ROLLOUT__WORKERS",
        "STAGECOACH_ROLLOUT_WORKERS": "STAGECOACH__ROLLOUT__WORKERS",
        "STAGECOACH_SEED": "STAGECOACH__SEED",
        "STAGECOACH_STOP_AT_MEAN_RETURN": "STAGECOACH__STOP_AT__MEAN_RETURN",
    }.items():
        text = refused(write(BASE), environ={name: "7"})
        assert text == f"environment variable {name} is never read; did you mean {right}?"
    environ = dict.fromkeys(["STAGECOACH_REDIS_PASSWORD", "STAGECOACH_PORT_6379_TCP", "STAGECOACH", "SEED"], "x")
    assert load_config(write(BASE), [], environ) == load_config(write(BASE), [], {})


BILLION_LAUGHS = "a: &a [x]\n" + "".join(
    f"{there}: &{there} [{','.join([f'*{here}'] * 8)}]\n" for here, there in itertools.pairwise("abcdefghi")
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed: 1\nseed: 2", "key 'seed' occurs twice"),
        ("rollout: {workers: 1, workers: 2}", "key 'workers' occurs twice"),
        ("environment: {id: A-v0, kwargs: {a: {b: 1, b: 1}}}", "key 'b' occurs twice"),
        ("a: b: c", "not valid YAML"),
        ("{{seed}}: 1", "cannot be a key"),
        ("? [a]\n: 1", "cannot be a key"),
        ("\tseed: 1", "not valid YAML"),
        ("seed: \0", "not valid YAML"),
        ("seed: !!python/object/apply:os.system [ls]", "not valid YAML"),
        ("seed: !!bool zz", "a tag (!!…) does not fit its value: KeyError: 'zz'"),
        ('seed: !!int ""', "a tag (!!…) does not fit its value"),
        ("runs_dir: !!timestamp zz", "a tag (!!…) does not fit its value"),
        ("environment: &e {id: CartPole-v1, kwargs: {a: *e}}", "or one of them holds itself"),
        (BILLION_LAUGHS, "more than 100,000 values"),
        ("seed: " + "[" * 3000, "nested too deeply"),
        ("- seed", "must hold a mapping of sections (environment: …), found list"),
        ("", "found NoneType"),
        ("1: 2", "1"),
        ("environment: CartPole-v1", "environment: expected a section, as in {name: value}, found 'CartPole-v1'"),
        ("seed: 1", "environment is missing; add it to the config or give --set environment=…"),
        ("environment: {}", "environment.id is missing"),
    ],
)
def test_invalid_file_is_rejected(text: str, words: str, write: WriteConfig) -> None:
    assert words in refused(write(text))


def test_unreadable_file_is_rejected(tmp_path: Path) -> None:
    assert "`stagecoach init` writes one" in refused(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot read" in refused(tmp_path) and "cannot read" in refused(tmp_path / "binary.yaml")


def test_yaml_merge_keys_have_lower_precedence(write: WriteConfig) -> None:
    text = BASE + "policies:\n  red: &base {hidden_sizes: [8], cnn: small}\n  blue: {<<: *base, hidden_sizes: [16]}\n"
    config = load_config(write(text), [], {})
    assert (config.policies["blue"].hidden_sizes, config.policies["blue"].cnn) == ((16,), "small")


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"algorithm": {"learning_rate": 1e-05, "clip_range": {"kind": "linear", "start": 0.3, "over": "9 episodes"}}},
        {"policies": {"red": {"hidden_sizes": []}, "1e3": {}}, "agents": {"a": "red", "null": "1e3", "5": "red"}},
        {"environment": {"id": "m:f", "wrappers": ["a:B", {"path": "c:D", "kwargs": {"x": None}}]}},
        {"heatup": "100 env_steps", "runs_dir": "/a folder/ä", "seed": 2**63 - 1},
        {"stop_at": {"mean_return": -0.5, "hours": 1e-9}},
    ],
    ids=str,
)
def test_config_dump_round_trips(sections: dict[str, Any], write: WriteConfig) -> None:
    config = minimal_config(**sections)
    found = load_config(write(dump_config(config)), [], {})
    assert (found, found.hash(), dump_config(found)) == (config, config.hash(), dump_config(config))


YAML_TRAPS = ["yes", "null", "~", "1_000", "0x1f", "12:30", "2020-01-01", "=", "<<", "a: b", "- a", "#", ".inf"]
number_texts = st.from_regex(r"\A[-+]?[0-9]{1,2}(\.[0-9]?)?([eE][-+]?[0-9]{1,2})?\Z")
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6), number_texts, st.sampled_from(YAML_TRAPS)
)
plain_values = st.recursive(
    scalars,
    lambda below: st.one_of(st.lists(below, max_size=2), st.dictionaries(st.text(max_size=5), below, max_size=2)),
    max_leaves=4,
)


@settings(derandomize=True, max_examples=60)
@given(kwargs=st.dictionaries(st.text(max_size=5), plain_values, max_size=3))
def test_environment_kwargs_round_trip(kwargs: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    config = parse_config({"environment": {"id": "X-v0", "kwargs": kwargs}, "stop_at": {"updates": 1}})
    path = tmp_path_factory.mktemp("dumped") / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    found = load_config(path, [], {})
    assert (repr(found.environment.kwargs), found.hash()) == (repr(kwargs), config.hash())
