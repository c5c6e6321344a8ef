"""The configuration: impossible combinations name both values, nothing secret gets in, and every field is used."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.config.algorithms.base import AlgorithmConfig
from stagecoach.shared.config.algorithms.off_policy import OffPolicyConfig
from stagecoach.shared.config.algorithms.registry import ALGORITHMS
from stagecoach.shared.config.compatibility import check_algorithm
from stagecoach.shared.config.loading import dump_config, parse_config
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.schema.section import Schedule
from stagecoach.shared.config.schema.validation import sections_in
from tests.conftest import minimal_config

ROOT = Path(__file__).parents[3]
PACKAGES = ("coordinator", "rollout_worker", "trainer_node", "shared")


def refused(**sections: Any) -> str:
    """The error text for a valid config with these sections replaced."""
    with pytest.raises(ConfigError) as caught:
        minimal_config(**sections)
    text = str(caught.value)
    assert "\n" not in text
    return text


CLONING: dict[str, Any] = {"algorithm": {"name": "bc", "minibatch_size": 32}, "dataset": {"path": "data.csv"}}
FEW: dict[str, Any] = {"fragment_steps": 8, "fragments_per_update": 2}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"algorithm": {"minibatch_size": 65}},
         ["minibatch_size=65", "64 transitions", "fragments_per_update=2", "fragment_steps=8", "num_envs=4"]),
        ({"agents": {"red": "blu"}, "policies": {"blue": {}}}, ["agents.red='blu'", "['blue']"]),
        ({"rollout": FEW | {"min_workers": 5, "max_workers": 3}},
         ["rollout.min_workers=5", "rollout.max_workers=3", "lower the first"]),
        ({"rollout": FEW | {"scaling": "auto", "workers": 2, "min_workers": 3}},
         ["rollout.workers=2", "rollout.min_workers=3"]),
        ({"rollout": FEW | {"scaling": "auto", "workers": 9, "max_workers": 8}},
         ["rollout.workers=9", "rollout.max_workers=8"]),
        ({"heatup": "3 updates"}, ["heatup: duration='3 updates'", "env_steps or episodes"]),
        ({"checkpoint": {"every": "0 updates"}}, ["checkpoint.every:", "at least 1"]),
        ({"stop_at": {}}, ["stop_at", "never end"]),
        ({"stop_at": {"evaluations": 3}}, ["stop_at", "never end"]),
        ({"evaluation": {"episodes": 0, "every": "1 updates"}}, ["episodes=0", "evaluation.every needs scores"]),
        ({"evaluation": {"episodes": 0}, "stop_at": {"success_rate": 0.5}}, ["stop_at.success_rate needs scores"]),
        ({"evaluation": {"episodes": 0}, "stop_at": {"mean_return": 0.5}}, ["stop_at.mean_return needs scores"]),
        ({"policies": {"a/b": {}}}, ["'a/b'", "letters, digits, - and _"]),
        ({"policies": {"trainer": {}}}, ["'trainer'", "not a valid policy id"]),
        ({"policies": {"x" * 101: {}}}, ["not a valid policy id", "at most 100 characters"]),
        ({"environment": {"id": "X-v0", "vectorization": "native", "wrappers": ["a:B"]}},
         ["with vectorization=native", "environment: wrappers=['a:B']"]),
        ({"environment": {"id": "a:b", "num_envs": 4, "api": "pettingzoo", "vectorization": "native"}},
         ["environment: api=pettingzoo", "sync or async", "vectorization=native"]),
        ({"redis": {"url": "redis://h:1", "ca_file": "/ca.crt"}}, ["redis.ca_file", "nothing would be encrypted"]),
        ({"redis": {"url": "rediss://h:1", "ca_file": "ca.crt"}}, ["must be an absolute path"]),
        ({"redis": {"url": "rediss://h:1", "cert_file": "/c.crt"}}, ["go together"]),
        ({"store": {"url": "s3://b", "endpoint_url": "http://h:1", "ca_file": "/ca.crt"}}, ["https://"]),
        ({"redis": {"url": "http://h"}}, ["redis.url must be 'embedded' or start with", "'http://h'"]),
        ({"redis": {"url": "h:6379"}}, ["redis.url must be 'embedded' or start with", "'h:6379'"]),
        ({"store": {"url": "gs://b"}}, ["store.url must be 'embedded' or start with", "'gs://b'"]),
        ({"policies": {"default": {"core": "gru"}}}, ["core=gru", "share_encoder=false", "set share_encoder=true"]),
        (CLONING | {"policies": {"default": {"core": "gru", "share_encoder": True}}},
         ["policies.default.core=gru with a dataset", "set core=none"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_contradictions_are_rejected_with_both_values(sections: dict[str, Any], words: list[str]) -> None:
    text = refused(**sections)
    assert [word for word in words if word not in text] == []
    minimal_config(algorithm={"minibatch_size": 64})  # the largest that fits


@pytest.mark.parametrize(
    ("sections", "where"),
    [
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "soon"}, "seed"),
        ({"environment": {"id": "X-v0", "num_envs": 0}}, "environment.num_envs"),
        ({"environment": {"id": "X-v0", "vectorization": "threads"}}, "environment.vectorization"),
        ({"environment": {"id": "X-v0", "num_envs": True}}, "environment: num_envs: expected a number, found true"),
        ({"algorithm": {"learning_rate": -0.1}}, "algorithm.learning_rate: expected 0 or more"),
        ({"algorithm": {"clip_range": {"kind": "linear", "start": 0.2, "end": -0.2, "over": "9 updates"}}},
         "algorithm.clip_range: expected 0 or more, found -0.2"),
        ({"policies": {}}, "policies is empty"),
        ({"policies": {"default": {"transform": "double"}}},
         "policies.default.transform: expected package.module:name, found 'double'"),
        ({"algorithm": {"gamma": 1.01}}, "algorithm.gamma"),
        ({"algorithm": {"name": "dqn", "exploration": {"kind": "m:C", "kwargs": {"a": 1}, "schedules": {"a": 1}}}},
         "algorithm.exploration: ['a'] stand in kwargs and in schedules"),
        ({"algorithm": {"name": "td3", "replay_buffer": {"kind": "hindsight", "hindsight_actions": True}}},
         "algorithm.replay_buffer.hindsight_actions and missed_penalty are for the upper levels"),
        ({"algorithm": {"name": "pop"}}, "algorithm.name"),
        ({"rollout": {"workers": 0}}, "rollout.workers"),
        ({"rollout": {"max_policy_lag": -1}}, "rollout.max_policy_lag"),
        ({"rollout": {"max_log_bytes": 1000}}, "rollout.max_log_bytes"),
        ({"trainer": {"device": "cuda:x"}}, "trainer.device"),
        ({"trainer": {"device": "gpu"}}, "trainer.device"),
        ({"stop_at": {"mean_return": float("nan")}}, "stop_at.mean_return"),
        ({"policies": {"default": {"hidden_sizes": [64, 0]}}}, "policies.default.hidden_sizes.1"),
        ({"stop_at": {"success_rate": 1.1}}, "stop_at.success_rate: expected 1 or less, found 1.1"),
        ({"checkpoint": {"every": "10 minutes"}}, "checkpoint.every"),
        ({"evaluation": "often"}, "evaluation"),
        ({"evaluation": {"every": "0 updates"}}, "evaluation.every: expected at least 1, found '0 updates'"),
        ({"metrics": {"every": "0 updates"}}, "metrics.every: expected at least 1, found '0 updates'"),
    ],
    ids=str,
)  # fmt: skip
def test_value_out_of_bounds_is_rejected_by_name(sections: dict[str, Any], where: str) -> None:
    assert refused(**sections).startswith(f"{where}")


SECRET = "hunter2"


@pytest.mark.parametrize(
    "sections",
    [
        {"redis": {"url": f"redis://:{SECRET}@host:6379/0"}},
        {"redis": {"url": f"rediss://user:{SECRET}@host:6379/0"}},
        {"redis": {"url": f"redis://host:6379/0?password={SECRET}"}},
        {"redis": {"url": f"http://:{SECRET}@host"}},
        {"redis": f"redis://:{SECRET}@host:6379/0"},
        {"redis": {"password": SECRET}},
        {"store": {"url": f"s3://key:{SECRET}@bucket"}},
        {"store": {"url": f"ftp://key:{SECRET}@bucket"}},
        {"store": {"url": "s3://bucket", "endpoint_url": f"http://key:{SECRET}@host:9000"}},
        {"store": {"url": "s3://bucket", "secret_key": SECRET}},
    ],
    ids=str,
)
def test_credentials_are_rejected_and_not_repeated(sections: dict[str, Any]) -> None:
    text, url = refused(**sections), str(sections).partition("'url': '")[2]
    assert SECRET not in text
    if "@" in url and url.startswith(("redis", "s3")):
        assert f"Use {'AWS_ACCESS_KEY_ID' if url.startswith('s3') else 'STAGECOACH_REDIS_PASSWORD'} instead" in text


def test_shorthands_expand_to_sections() -> None:
    config = minimal_config(
        redis={"url": "rediss://h:6380/2"},
        store={"url": "s3://b/p", "endpoint_url": "http://h:1"},
        environment={"id": "X-v0", "wrappers": ["a:B", {"path": "c:D", "kwargs": {"n": 1}}]},
        policies={"red": {}, "blue": {}},
        agents={"a": "red"},
    )
    assert (config.redis.url, config.store.url) == ("rediss://h:6380/2", "s3://b/p")
    assert [(each.path, each.kwargs) for each in config.environment.wrappers] == [("a:B", {}), ("c:D", {"n": 1})]
    assert (config.policy_of("a"), minimal_config().policy_of("anyone")) == ("red", "default")
    with pytest.raises(KeyError):
        config.policy_of("b")


def test_config_is_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        minimal_config().rollout.workers = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "sections",
    [
        {"seed": 2},
        {"algorithm": {"minibatch_size": 32, "epochs": 3}},
        {"heatup": "1 env_steps"},
        {"policies": {"default": {"hidden_sizes": [8]}}},
        {"policies": {"default": {"layer_norm": True}}},
        {"algorithm": {"weight_decay": 0.01}},
        {"environment": {"id": "CartPole-v1", "num_envs": 5}},
        {"environment": {"id": "CartPole-v1", "num_envs": 4, "info_columns": ["cost"]}},
        {"trainer": {"torch_threads": 2}},
        {"trainer": {"matmul_precision": "medium"}},
        {"trainer": {"precision": "bfloat16"}},
        {"trainer": {"ranks": 2}},
        {"metrics": {"window_episodes": 7}},
        CLONING,
        CLONING | {"dataset": {"path": "data.csv", "sha256": "0" * 64}},
    ],
    ids=str,
)
def test_hash_covers_fields_that_decide_learning(sections: dict[str, Any]) -> None:
    changed = minimal_config(**sections)
    assert changed.hash() != minimal_config().hash()
    named = changed.decides_otherwise(minimal_config())
    assert named and {path.partition(".")[0] for path in named} <= {*sections, "algorithm", "rollout", "policies"}
    assert changed.decides_otherwise(changed) == []


@pytest.mark.parametrize(
    "sections",
    [
        {"runs_dir": "/tmp/elsewhere"},
        {"redis": {"url": "redis://h"}},
        {"store": {"url": "s3://b"}},
        {"ray": {"num_cpus": 3}},
        {"metrics": {"writers": ["jsonl"]}},
        {"stop_at": {"updates": 99}},
        {"rollout": FEW | {"scaling": "auto", "max_workers": 9, "workers": 3, "placement": "pack"}},
    ],
    ids=str,
)
def test_hash_ignores_placement_and_length(sections: dict[str, Any]) -> None:
    assert minimal_config(**sections).hash() == minimal_config().hash()
    one, other = (minimal_config(environment={"id": "X-v0", "kwargs": k}) for k in ({"a": 1, "b": 2}, {"b": 2, "a": 1}))
    assert one.hash() == other.hash(), "nor does the order of keys"
    here, there, other = (
        minimal_config(**CLONING | {"dataset": {"path": path, "sha256": digit * 64}})
        for path, digit in (("a.csv", "0"), ("b.h5", "0"), ("a.csv", "1"))
    )
    assert here.hash() == there.hash() != other.hash(), "nor does where a dataset lies, but what it holds"


def fields(model: type[BaseModel], section: str = "config") -> Iterator[tuple[str, str, str]]:
    """Section, field and description of every value of the config."""
    for name, field in model.model_fields.items():
        below = sections_in(field.annotation)
        if not below or below[0] is Schedule:
            yield section, name, field.description or ""
        else:
            yield from fields(below[0], name)


def reads(texts: Iterator[str]) -> set[tuple[str, str]]:
    """Every `owner.attribute` in these sources; `config.policies[id].cnn` is read from `policies`."""
    found = set()
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value.value if isinstance(node.value, ast.Subscript) else node.value
                name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                found.add((name.lstrip("_"), node.attr))
    return found


CALLED = {
    "policies": "policy",
    "levels": "level",
    "wrappers": "wrapper",
    "stop_at": "stop",
    "learners": "learner",
    "fixed": "player",
    "agents": "agent",
    "parameters": "entry",
    "until": "criterion",
    "back": "criterion",
}
"""What the code calls a section, or one item of it, where it holds it in a variable; otherwise its name or `config`."""
NOT_READ = {("algorithm", "name"), ("algorithm", "normalize_values")}
"""Decides which algorithm's section is meant; the section itself hands it to the network (`network`)."""


def test_every_field_is_read_and_described() -> None:
    sources = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    used = reads(path.read_text() for path in sources)
    assert ("config", "clip_range") in used and ("config", "clip_rage") not in used
    assert [
        f"{section}.{name}"
        for section, name, description in fields(Config)
        if ((section, name) not in NOT_READ
        and not used & {(owner, name) for owner in (section, CALLED.get(section, section), "config")})
        or (len(description) < 10 and name != "name")
    ] == []  # fmt: skip


def short(algorithm: Any, **sections: Any) -> Config:
    """A config that says no more than it must."""
    needed = {"dataset": {"path": "data.csv"}} if algorithm == "bc" else {}
    least = {"environment": {"id": "CartPole-v1"}, "stop_at": {"updates": 1}, "algorithm": algorithm}
    return parse_config(least | needed | sections)


def holds(found: Any, wanted: Any) -> bool:
    """Whether `found` has all values of `wanted`, section by section."""
    if isinstance(wanted, Mapping):
        return all(holds(found[name], value) for name, value in wanted.items())
    return bool(found == wanted)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithm_defaults_complete_the_config(name: str) -> None:
    """docs/reference/config.md, which is compared with the code, shows these defaults."""
    config, defaults = short(name), json.loads(json.dumps(dict(ALGORITHMS[name].defaults)))
    defaults |= {"policies": {"default": defaults.get("policies", {})}}
    assert holds(config.model_dump(mode="json"), defaults)
    if isinstance(config.algorithm, OffPolicyConfig):
        assert config.rollout.max_policy_lag > 0, "acting goes on during gradient steps"
    assert parse_config(yaml.safe_load(dump_config(config))) == config


def test_explicit_values_override_algorithm_defaults() -> None:
    rollout = {"max_policy_lag": 0, "fragments_per_update": 3}
    config = short("sac", heatup="0 env_steps", rollout=rollout, policies={"a": {"activation": "elu"}, "b": {}})
    assert config.heatup.duration.amount == config.rollout.max_policy_lag == 0
    assert (config.rollout.fragments_per_update, config.rollout.fragment_steps) == (3, 8)
    policies = {name: (policy.hidden_sizes, policy.activation) for name, policy in config.policies.items()}
    assert policies == {"a": ((256, 256), "elu"), "b": ((256, 256), "relu")}
    assert config.hash() != short("sac").hash()


def test_dataset_has_no_warm_up_and_defaults_hide_no_mistake() -> None:
    data = {"path": "data.csv"}
    assert short("sac", dataset=data).heatup.duration.amount == 0
    for section, value, said in (
        ("dataset", data | {"only_heatup": True}, "set a duration, such as heatup="),
        ("policies", None, "policies"),
        ("policies", {"a": None}, "policies"),
        ("rollout", 3, "rollout"),
    ):
        with pytest.raises(ConfigError, match=said):
            short("sac", **{section: value})


def test_minibatch_of_custom_algorithm_holds_a_sequence() -> None:
    class Own(AlgorithmConfig):
        name: str = "own"
        minibatch_size: int = 8

    run = minimal_config(policies={"default": {"core": "lstm", "share_encoder": True}}, rollout={"fragment_steps": 16})
    check_algorithm(run, "default", Own(minibatch_size=16))
    with pytest.raises(ValueError, match=r"minibatch_size=8 is less than rollout\.fragment_steps=16"):
        check_algorithm(run, "default", Own())
