"""What a run is refused for before anything of it starts: what no value of Redis holds."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator import preparation
from coordinator.preparation import check
from shared.errors import ConfigError
from tests.conftest import minimal_config


def of_width(width: int, **sections: Any) -> Any:
    return minimal_config(policies={"default": {"hidden_sizes": [width]}}, **sections)


def test_a_version_that_no_value_holds_is_refused_and_the_store_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "_MOST_VALUE_BYTES", 50_000)
    check(of_width(64))
    with pytest.raises(ConfigError, match=r"a policy version of \d+ bytes .*policy_versions.transport: object_store"):
        check(of_width(2000))
    check(of_width(2000, policy_versions={"transport": "object_store"}))


@pytest.mark.parametrize("transport", ["redis", "object_store"])
def test_a_network_that_no_machine_holds_is_refused_without_taking_its_memory(transport: str) -> None:
    policies = {"default": {"hidden_sizes": [65536] * 100}}
    with pytest.raises(ConfigError, match=r"the policies take [\d,.]+ GB, to train .* this machine has .*hidden_sizes"):
        check(minimal_config(policies=policies, policy_versions={"transport": transport}))


def test_an_evaluation_with_other_spaces_is_refused() -> None:
    wrapper = {"path": "rollout_worker.wrappers:MapAction", "kwargs": {"actions": [0, 1]}}
    check(minimal_config(evaluation={"wrappers": [wrapper]}))
    for wrapped in ({**wrapper, "kwargs": {"actions": [0]}}, "gymnasium.wrappers:TimeAwareObservation"):
        with pytest.raises(ConfigError, match=r"evaluation\.wrappers.* has other spaces than the one of training"):
            check(minimal_config(evaluation={"wrappers": [wrapped]}))


def test_a_fragment_that_no_value_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "_MOST_VALUE_BYTES", 50_000)
    check(of_width(8, rollout={"fragment_steps": 64}))
    with pytest.raises(ConfigError, match=r"a fragment of about \d+ bytes .*lower rollout.fragment_steps or"):
        check(of_width(8, rollout={"fragment_steps": 640}))
