"""Every kind of policy as an ONNX file: it acts as torch does, in the environment's own terms."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from stagecoach.rollout_worker.environments.description import describe_space
from stagecoach.rollout_worker.league.opponents import Exported
from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.deployment.deployed_policy import DeployedPolicy
from stagecoach.shared.experience.spaces import Columns, PolicySpaces
from stagecoach.shared.policies.actor_critic import ActorCritic, RecurrentActorCritic
from stagecoach.shared.policies.continuous import Actor, Deterministic
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.q_network import QNetwork, RecurrentQNetwork
from stagecoach.shared.policies.serialization import encode_policy
from stagecoach.shared.storage.checkpoint_store import Manifest
from stagecoach.trainer_node.export import compare, described, exported, random_observations, to_onnx
from tests.support.suite.groups import some_quick

SEEN = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (2, 12, 12, 3), np.uint8),
        "choice": spaces.Discrete(3, start=2),
        "exact": spaces.Box(-np.inf, np.inf, (), np.float64),
        "flags": spaces.MultiBinary(3),
        "many": spaces.MultiDiscrete([2, 3], start=[1, -1]),
        "vector": spaces.Tuple((spaces.Box(-1, 1, (4,)), spaces.Box(-5, 5, (2, 2), np.int16))),
    }
)
FEW = spaces.Dict({"choice": spaces.Discrete(3, start=2), "vector": spaces.Box(-1, 1, (4,), np.float64)})
DONE = spaces.Dict(
    {
        "arm": spaces.Box(np.array([-0.01, -np.inf]), np.array([0.01, np.inf]), dtype=np.float64),
        "flags": spaces.MultiBinary(2),
        "gears": spaces.MultiDiscrete([2, 3], start=[5, 0]),
    }
)
ONE_OF_FOUR = spaces.Discrete(4, start=1)
ARM = spaces.Dict({"x": spaces.Box(-2, 3, (2,)), "y": spaces.Box(0, 1, (), np.float64)})
PLAIN = PolicyConfig(cnn="small", hidden_sizes=(16,), normalize_observations=True)
NORMED = PLAIN.model_copy(update={"cnn": "residual", "layer_norm": True})


def of(observation: spaces.Space[Any], action: spaces.Space[Any]) -> PolicySpaces:
    return PolicySpaces(describe_space(observation), describe_space(action))


def with_core(core: str) -> PolicyConfig:
    return PLAIN.model_copy(update={"core": core, "core_size": 8, "share_encoder": True})


KINDS: dict[str, Callable[[], Policy]] = {
    "actor_critic": lambda: ActorCritic(of(SEEN, DONE), PLAIN),
    "lstm": lambda: RecurrentActorCritic(of(SEEN, DONE), with_core("lstm")),
    "gru": lambda: RecurrentActorCritic(of(FEW, ONE_OF_FOUR), with_core("gru")),
    "dqn": lambda: QNetwork(of(FEW, ONE_OF_FOUR), PLAIN),
    "rainbow": lambda: QNetwork(of(SEEN, ONE_OF_FOUR), PLAIN, head="c51", dueling=True, noisy=True),
    "quantiles": lambda: QNetwork(of(FEW, ONE_OF_FOUR), PLAIN, head="qr", dueling=True),
    "ensemble": lambda: QNetwork(of(FEW, ONE_OF_FOUR), PLAIN, dueling=True, heads=3, prior_scale=1.0),
    "normed ensemble": lambda: QNetwork(of(FEW, ONE_OF_FOUR), NORMED, heads=3, prior_scale=1.0),
    "r2d2": lambda: RecurrentQNetwork(of(SEEN, ONE_OF_FOUR), with_core("lstm"), dueling=True),
    "r2d2, gru": lambda: RecurrentQNetwork(of(FEW, ONE_OF_FOUR), with_core("gru")),
    "residual": lambda: ActorCritic(of(SEEN, DONE), NORMED),
    "sac": lambda: Actor(of(SEEN, ARM), PLAIN),
    "discrete sac": lambda: Actor(of(FEW, ONE_OF_FOUR), PLAIN),
    "td3": lambda: Deterministic(of(FEW, ARM), PLAIN),
}
MANIFEST = Manifest(
    run_id="a", name="3_Step-96.ckpt", version=3, epoch=1, created=1.0, log_position="0-0", parent=None, objects={},
    provenance={},
)  # fmt: skip


def made(kind: str) -> Policy:
    """With weights and statistics that matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        policy = KINDS[kind]()
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    assert policy.normalizer is not None
    for columns in random_observations(policy.spaces.observation):
        policy.normalizer.update({name: torch.from_numpy(array) for name, array in columns.items()})
    return policy.eval()


def sampled(space: spaces.Space[Any], steps: int, slots: int) -> list[Any]:
    """What an environment would give: nested batches, step after step."""
    space.seed(7)
    spec = describe_space(space)
    steps_: list[Any] = []
    for _ in range(steps):
        rows = [spec.flatten("obs", space.sample()) for _ in range(slots)]
        steps_.append(spec.nest("obs", {name: np.stack([row[name] for row in rows]) for name in rows[0]}))
    return steps_


def leaves_of(value: Any, prefix: str) -> Columns:
    """Nested arrays by column name, as they are."""
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, tuple):
        items = enumerate(value)
    else:
        return {prefix: value}
    return {name: array for key, below in items for name, array in leaves_of(below, f"{prefix}.{key}").items()}


@pytest.mark.parametrize("kind", some_quick(KINDS, "actor_critic", "gru", "sac"))
def test_onnx_file_and_opponent_act_as_deployed_policy(kind: str) -> None:
    """`load_policy(…).act_batch` is the other side: it shares no code with the file's own conversions."""
    policy = made(kind)
    data, record = exported(encode_policy(policy, 3), MANIFEST, list(random_observations(policy.spaces.observation)))
    assert record.failure is None, record.failure
    assert {name: one.rows for name, one in record.compared.items()} == {"random": 256, "recorded": 256}
    assert all(one.max_difference < 1e-4 and one.other_choices == 0 for one in record.compared.values())
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    deployed, state = DeployedPolicy(policy, 3), np.zeros((5, policy.state_size), np.float32)
    player, slots = Exported(data, policy.spaces), np.array([6, 1, 3, 0, 4])
    assert player.state_size == policy.state_size
    player.state = torch.zeros(7, policy.state_size) if policy.state_size else None
    acted = []
    for observation in sampled(SEEN if len(policy.spaces.observation.leaves) > 2 else FEW, steps=6, slots=5):
        fed = leaves_of(observation, "obs") | ({"state_in": state} if policy.state_size else {})
        assert {item.name for item in session.get_inputs()} == set(fed)
        found = dict(zip([item.name for item in session.get_outputs()], session.run(None, fed), strict=True))
        state = found.get("state_out", state)
        wanted = leaves_of(deployed.act_batch(observation), "action")
        assert set(found) - set(wanted) == {"parameters"} | ({"state_out"} if policy.state_size else set())
        for name, array in wanted.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
            np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-6)
        acted.append(wanted)
        columns = policy.spaces.observation.flatten("obs", observation)
        placed = {name: np.zeros((7, *array.shape[1:]), array.dtype) for name, array in columns.items()}
        for name, array in columns.items():
            placed[name][slots] = array
        chosen = policy.spaces.action.to_environment(player.act(placed, slots, torch.Generator()))
        for name, array in leaves_of(chosen, "action").items():
            np.testing.assert_allclose(array, wanted[name], rtol=1e-4, atol=1e-6)
    assert player.state is None or not player.state[[2, 5]].any()
    assert any(len(np.unique(np.concatenate([step[name].ravel() for step in acted]))) > 1 for name in acted[0])


def test_onnx_metadata_names_policy_and_no_local_path() -> None:
    policy = made("gru")
    data = to_onnx(policy, described(policy, MANIFEST, 3))
    model = onnx.load_from_string(data)
    said = {item.key: item.value for item in model.metadata_props}
    assert said["stagecoach.run_id"] == "a" and said["stagecoach.checkpoint"] == MANIFEST.name
    assert (said["stagecoach.version"], said["stagecoach.state_size"]) == ("3", "8")
    assert PolicySpaces.from_dict(json.loads(said["stagecoach.spaces"])) == policy.spaces
    assert [item.type.tensor_type.shape.dim[0].dim_param for item in model.graph.input] == ["batch"] * 3
    assert b"site-packages" not in data and __file__.encode() not in data
    onnx.checker.check_model(model, full_check=True)


def test_compare_detects_file_of_other_weights() -> None:
    policy = made("dqn")
    data = to_onnx(policy, {})
    batches = list(random_observations(policy.spaces.observation))
    assert compare(policy, data, batches).max_difference < 1e-4
    with torch.no_grad():
        next(policy.parameters()).mul_(1.5)
    with pytest.raises(ValueError, match=r"parameters differs from torch by .*: the file acts otherwise"):
        compare(policy, data, batches)


def test_compare_counts_other_choices_among_equally_good_ones() -> None:
    """The largest of equal values is the first one to torch and to ONNX Runtime, so the tie is broken by hand."""
    policy = made("dqn")
    data = to_onnx(policy, {})
    batches = list(random_observations(policy.spaces.observation))

    class Last:
        def mode(self, params: Tensor) -> dict[str, Tensor]:
            return {"action": params.argmin(dim=1)}

    policy.distribution = Last()  # type: ignore[assignment]
    assert compare(policy, data, batches).other_choices == 256
