"""Where a new run's policies begin: weights are taken over only where they compute the same."""

from __future__ import annotations

from typing import Any, cast

import pytest

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.policies.registry import build_policies
from stagecoach.shared.policies.serialization import encode_policy
from stagecoach.shared.storage.checkpoint_store import Checkpoint, Manifest
from stagecoach.trainer_node.state.fork import Source, take_over
from tests.conftest import minimal_config
from tests.support.fragments import SIMPLE


def policy_of(**sections: Any) -> Any:
    config = minimal_config(**sections)
    return build_policies(SIMPLE.policies, config.policies, config.algorithm, 0)["default"]


def taken(there: dict[str, Any], here: dict[str, Any]) -> None:
    manifest = cast(Any, Manifest).model_construct(name="1_Step-1.ckpt", run_id="other")
    source = Source(
        Checkpoint(manifest, {"default/policy.safetensors": encode_policy(policy_of(**there), 1)}), "default"
    )
    take_over("default", policy_of(**here), source)


@pytest.mark.parametrize(
    ("name", "field", "values"),
    [
        ("dqn", "v_max", (10.0, 200.0)), ("dqn", "v_min", (-10.0, 0.0)), ("dqn", "prior_scale", (1.0, 3.0)),
        ("r2d2", "rescale_values", (True, False)),
    ],
)  # fmt: skip
def test_the_same_weights_of_a_q_network_are_not_taken_for_other_values(
    name: str, field: str, values: tuple[Any, Any]
) -> None:
    more = {"head": "c51"} if field.startswith("v_") else {"heads": 3} if field == "prior_scale" else {}
    exploring = {"exploration": {"kind": "bootstrapped"}} if "heads" in more else {}
    cores = {"policies": {"default": {"core": "lstm", "share_encoder": True}}} if name == "r2d2" else {}
    there, here = ({"algorithm": {"name": name, field: its} | more | exploring} | cores for its in values)
    taken(there, there)
    with pytest.raises(
        ConfigError, match=r"is another network than policies.default asks for: its algorithm asked for"
    ):
        taken(there, here)
