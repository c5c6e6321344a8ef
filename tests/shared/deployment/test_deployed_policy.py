"""`load_policy`: a checkpoint's policy acts in the environment's own terms, alone and in batches."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stagecoach.rollout_worker.environments.description import describe_space
from stagecoach.shared.base.errors import CheckpointDamaged, CheckpointNotFound, UserError
from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.deployment.deployed_policy import DeployedPolicy, load_policy
from stagecoach.shared.experience.spaces import PolicySpaces
from stagecoach.shared.policies.actor_critic import ActorCritic
from stagecoach.shared.policies.q_network import QNetwork, RecurrentQNetwork, unscaled
from stagecoach.shared.policies.serialization import encode_policy
from stagecoach.shared.storage.checkpoint_store import CHECKPOINTS, MANIFEST, POINTER, PROMOTED, CheckpointStore
from stagecoach.shared.storage.object_store import FileStore
from tests.support.environments.small import ACTIONS, OBSERVATIONS
from tests.support.experience.policies import built_policy
from tests.support.runs.checkpoints import manifest_of


def policy_bytes(observation: str = "box", action: str = "discrete", seed: int = 1, version: int = 7) -> bytes:
    """An untrained policy for these spaces, as it stands in a checkpoint."""
    policy = built_policy(OBSERVATIONS[observation], ACTIONS[action], seed=seed, cnn="small")
    return encode_policy(policy, version)


def observe(name: str, seed: int = 0) -> Any:
    space = OBSERVATIONS[name]
    space.seed(seed)
    return space.sample()


def test_policy_loads_from_checkpoint_file_or_bytes(tmp_path: Path) -> None:
    data = policy_bytes()
    folder = tmp_path / "7_Step-1.ckpt"
    (folder / "default").mkdir(parents=True)
    (folder / "default" / "policy.safetensors").write_bytes(data)
    observation = observe("box")
    expected = load_policy(data).act(observation)
    for source in (folder, str(folder), folder / "default", folder / "default" / "policy.safetensors"):
        policy = load_policy(source)
        assert policy.version == 7
        assert policy.act(observation) == expected
    (folder / "default").rename(folder / "hunter")
    (folder / "prey").mkdir()
    (folder / "prey" / "policy.safetensors").write_bytes(policy_bytes(version=4))
    assert [load_policy(folder, policy_id).version for policy_id in ("hunter", "prey")] == [7, 4]
    with pytest.raises(CheckpointNotFound, match=r"'default' at .*; it has hunter, prey; give one as policy_id$"):
        load_policy(folder)
    with pytest.raises(CheckpointNotFound, match="nowhere"):
        load_policy(tmp_path / "nowhere")
    with pytest.raises(CheckpointDamaged, match="corrupt"):
        load_policy(data[:-4] + bytes([data[-4] ^ 1]) + data[-3:])
    with pytest.raises(AttributeError, match=r"a policy has no 'predict'; act\(observation\) returns the action alone"):
        getattr(load_policy(data), "predict")  # noqa: B009 - mypy would find it


def make_run(folder: Path) -> None:
    """A run's folder in a store of files, with three checkpoints, each written by two trainers."""
    store = CheckpointStore(FileStore(folder.parent, folder.name), "the-run")
    for version in (1, 2, 3):
        for epoch, seed in ((2, 1), (1, 2)):
            objects = {"default/policy.safetensors": policy_bytes(version=version, seed=seed)}
            store.write(manifest_of(version, objects, name=f"{version}_Step-1.ckpt", epoch=epoch), objects)
    content = {"latest": "3_Step-1.ckpt", "epoch": 1, "manifest_sha256": ""}
    (folder / POINTER).write_text(json.dumps(content))


def test_run_folder_selects_promoted_best_or_newest(tmp_path: Path) -> None:
    make_run(tmp_path)
    assert load_policy(tmp_path).version == 3
    observation, counts = observe("box"), load_policy(policy_bytes(seed=1))
    for source in (tmp_path, tmp_path / CHECKPOINTS / "3_Step-1.ckpt"):
        assert load_policy(source).act(observation, greedy=False) == counts.act(observation, greedy=False)
    pointer = json.loads((tmp_path / POINTER).read_text())
    (tmp_path / POINTER).write_text(json.dumps(pointer | {"best": "2_Step-1.ckpt"}))
    assert load_policy(tmp_path).version == 2
    uploads = sorted((tmp_path / CHECKPOINTS / "1_Step-1.ckpt").glob(f"*/{MANIFEST}"))
    for manifest in uploads:
        digest = hashlib.sha256(manifest.read_bytes()).hexdigest()
        promotion = {"checkpoint": "1_Step-1.ckpt", "manifest_sha256": digest, "time": 1}
        (tmp_path / PROMOTED).write_text(json.dumps(promotion))
        assert load_policy(tmp_path).version == 1
    manifest.write_text("another manifest")
    with pytest.raises(CheckpointDamaged, match="is not the one that was promoted"):
        load_policy(tmp_path)
    for manifest in uploads:
        manifest.write_text("no manifest")
    with pytest.raises(CheckpointDamaged, match=r"the manifest in .*1_Step-1\.ckpt cannot be read"):
        load_policy(tmp_path / CHECKPOINTS / "1_Step-1.ckpt")
    for manifest in uploads:
        manifest.unlink()
    with pytest.raises(CheckpointNotFound, match=r"no policy 'default' at .*1_Step-1\.ckpt"):
        load_policy(tmp_path)
    for key in (PROMOTED, POINTER):
        (tmp_path / key).write_text("{")
        with pytest.raises(CheckpointDamaged, match="cannot be read; name one of its checkpoints"):
            load_policy(tmp_path)
        (tmp_path / key).unlink()
    with pytest.raises(CheckpointNotFound, match=r"\.checkpoint is missing"):
        load_policy(tmp_path)


@pytest.mark.parametrize(
    ("space", "observation", "said"),
    [
        ("box", "abc", r"an observation must be an array of shape \(3,\) and dtype float32 .*, found \['abc'\]"),
        (
            "box",
            [1, [2], 3],
            r"an observation must be an array of shape \(3,\) and dtype float32 .*, found \[1, \[2\], 3\]",
        ),
        ("box", [0.0, np.nan, 0.0], "observation: expected finite numbers, found NaN or infinity"),
        ("box", [[0.0, 1.0, 0.0]], r"expected the shape \(3,\), found \(1, 3\); act_batch takes a batch"),
        ("box", [0.0, 1.0], r"observation: expected the shape \(3,\), found \(2,\)"),
        ("discrete", 3, r"observation: expected choices from -2 to 2, found \[3\]"),
        ("discrete", None, r"an observation must be an array of shape \(\) and dtype int64 .*, found \[None\]"),
        ("dict", {"joints": [0] * 4}, r"an observation must be \{'camera': an array of shape \(8, 8, 3\).* 'mode': an"),
        ("dict", [1], r"an observation must be \{'camera': .*\[1\]"),
        ("tuple", (0,), r"an observation must be \(an array of shape \(\) and dtype int64, \{'x': .*\}\) .*, found \("),
    ],
)
def test_invalid_observation_error_shows_expected_form(space: str, observation: Any, said: str) -> None:
    policy = load_policy(policy_bytes(space))
    policy.act(observe(space))
    with pytest.raises(UserError, match=said):
        policy.act(observation)


def test_batch_parts_have_equal_length() -> None:
    policy = load_policy(policy_bytes("dict"))
    batch = {name: np.asarray(part)[None] for name, part in observe("dict").items()}
    policy.act_batch(batch)
    with pytest.raises(UserError, match=r"an observation must be .* batch axis first"):
        policy.act_batch(batch | {"joints": np.repeat(batch["joints"], 2, axis=0)})


def test_run_folder_reads_embedded_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bucket = tmp_path / "runs" / "a" / "s3" / "stagecoach"
    bucket.mkdir(parents=True)
    make_run(bucket / "a")
    for place in ("runs/a", tmp_path / "runs" / "a", f"file://{tmp_path}/runs/a", "runs/a/s3/stagecoach/a"):
        assert load_policy(place).version == 3
    (tmp_path / "runs" / "b").mkdir()
    (tmp_path / "runs" / "b" / "config.yaml").touch()
    for wrong, said in (
        ("a", "of a run of this machine give its folder, runs/a"), (None, "load_policy takes a checkpoint's or a"),
        ("s3://bucket/a", "checkpoints export RUN` makes such"), ("runs/b", "checkpoints export RUN` makes such"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            load_policy(wrong)  # type: ignore[arg-type]
    with pytest.raises(CheckpointNotFound, match=r"no policy 'other' at .*; it has default"):
        load_policy("runs/a", "other")


def test_acting_imports_no_store_redis_ray_or_gymnasium() -> None:
    code = (
        "import sys, stagecoach.shared.deployment.deployed_policy; "
        "print(*{'boto3', 'redis', 'ray', 'gymnasium'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    ("observation", "action"), [*(("box", name) for name in ACTIONS), *((name, "discrete") for name in OBSERVATIONS)]
)
def test_deployed_policy_supports_every_space(observation: str, action: str) -> None:
    policy = load_policy(policy_bytes(observation, action))
    for seed in range(5):
        for greedy in (True, False):
            assert ACTIONS[action].contains(policy.act(observe(observation, seed), greedy=greedy))


def test_greedy_is_deterministic_and_sampling_is_not() -> None:
    state = torch.random.get_rng_state()
    policy = load_policy(policy_bytes(action="box"))
    observation = observe("box")
    assert len({tuple(policy.act(observation)) for _ in range(5)}) == 1
    assert len({tuple(policy.act(observation, greedy=False)) for _ in range(5)}) == 5
    assert torch.equal(state, torch.random.get_rng_state()), "neither loading nor acting draws global random numbers"
    np.testing.assert_array_equal(policy.act(observation.tolist()), policy.act(observation))
    observations = np.stack([observe("box", seed) for seed in range(6)])
    batch = policy.act_batch(observations)
    assert batch.shape == (6, 2)
    np.testing.assert_allclose(batch, [policy.act(row) for row in observations], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("action", ["discrete", "multi_discrete", "box", "dict"])
def test_deployed_policy_reports_value_and_probabilities(action: str) -> None:
    policy = load_policy(policy_bytes(action=action))
    observations = np.stack([observe("box", seed) for seed in range(4)])
    taken = policy.act_batch(observations, greedy=False)
    seen = policy.inspect_batch(observations, actions=taken)
    network = built_policy(OBSERVATIONS["box"], ACTIONS[action], seed=1, cnn="small")
    tensors = {"obs": torch.from_numpy(observations)}
    params = network.action_parameters(tensors)
    columns = {key: torch.from_numpy(array) for key, array in network.spaces.action.flatten("action", taken).items()}
    np.testing.assert_allclose(seen.log_prob, network.distribution.log_prob(params, columns).detach(), rtol=1e-4)
    np.testing.assert_allclose(seen.value, network.value(tensors).detach(), rtol=1e-5)
    assert seen.action_values is None
    if action == "box":
        assert seen.probabilities is None
        with pytest.raises(UserError, match=r"an action must be .* one per observation, found"):
            policy.inspect(observations[0], action=[1.0])
        return
    assert seen.probabilities is not None
    sizes = [options for leaf in network.spaces.action.leaves for options in leaf.nvec]
    parts = np.split(seen.probabilities, np.cumsum(sizes)[:-1], axis=1)
    assert all(np.allclose(part.sum(axis=1), 1) for part in parts) and seen.probabilities.shape == (4, sum(sizes))
    if action == "discrete":
        chosen = network.spaces.action.flatten("action", taken)["action"]
        np.testing.assert_allclose(np.exp(seen.log_prob), parts[0][np.arange(4), chosen], rtol=1e-5)
    one = policy.inspect(observations[2], action=_nth(taken, 2))
    np.testing.assert_allclose(one.value, seen.value[2], rtol=1e-5)
    np.testing.assert_allclose(one.log_prob, seen.log_prob[2], rtol=1e-4)


def _nth(nested: Any, row: int) -> Any:
    if isinstance(nested, dict):
        return {key: _nth(value, row) for key, value in nested.items()}
    return tuple(_nth(value, row) for value in nested) if isinstance(nested, tuple) else nested[row]


def test_q_network_reports_value_of_each_choice() -> None:
    spaces = PolicySpaces(describe_space(OBSERVATIONS["box"]), describe_space(ACTIONS["discrete"]))
    policy = DeployedPolicy(QNetwork(spaces, PolicyConfig(), dueling=True), 1)
    seen = policy.inspect(observe("box"))
    assert seen.action_values is not None and seen.probabilities is None
    assert seen.value == seen.action_values.max()
    assert policy.act(observe("box")) - ACTIONS["discrete"].start == seen.action_values.argmax()  # type: ignore[attr-defined]


def test_recurrent_q_values_are_in_reward_units() -> None:
    spaces = PolicySpaces(describe_space(OBSERVATIONS["box"]), describe_space(ACTIONS["discrete"]))
    config = PolicyConfig(core="gru", share_encoder=True)
    plain, learned = (RecurrentQNetwork(spaces, config, rescaled=rescaled) for rescaled in (False, True))
    learned.load_state_dict(plain.state_dict())
    first, second = (DeployedPolicy(its, 1).inspect(observe("box")) for its in (plain, learned))
    assert first.action_values is not None and second.action_values is not None
    np.testing.assert_allclose(second.action_values, unscaled(torch.from_numpy(first.action_values)).numpy(), rtol=1e-5)
    assert second.value == second.action_values.max()


@pytest.mark.parametrize("unknown", [{"without_value": True}, {"agents": 2}])
def test_centralized_value_is_not_reported(unknown: dict[str, Any]) -> None:
    spaces = PolicySpaces(describe_space(OBSERVATIONS["box"]), describe_space(ACTIONS["discrete"]))
    seen = DeployedPolicy(ActorCritic(spaces, PolicyConfig(), **unknown), 1).inspect(observe("box"))
    assert seen.value is None and seen.probabilities is not None


def test_hidden_state_is_readable_and_settable() -> None:
    policy = load_policy(encode_policy(built_policy(
        OBSERVATIONS["box"], ACTIONS["box"], core="lstm", core_size=7, share_encoder=True
    ), 1))  # fmt: skip
    assert policy.state is None
    policy.act(observe("box", 1))
    before = policy.state
    assert before is not None and before.shape == (1, 14)
    first = policy.inspect(observe("box", 2))
    np.testing.assert_array_equal(policy.state, before)
    action, after = policy.act(observe("box", 2)), policy.state
    policy.state = before
    assert policy.inspect(observe("box", 2)) == first and first.value is not None
    np.testing.assert_array_equal(policy.act(observe("box", 2)), action)
    np.testing.assert_array_equal(policy.state, after)
    with pytest.raises(UserError, match=r"state: expected \[episodes, 14\], found \[1, 3\]"):
        policy.state = np.zeros((1, 3))
    with pytest.raises(UserError, match=r"expected \[episodes, 0\]"):
        load_policy(policy_bytes()).state = np.zeros((1, 3))
