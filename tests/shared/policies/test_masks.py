"""Action masks: whatever acts or learns by a policy's outputs knows of no illegal choice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from stagecoach.rollout_worker.acting_policies import make_exploration
from stagecoach.rollout_worker.environments.action_masks import from_info, marked
from stagecoach.rollout_worker.environments.description import describe_environment, describe_space
from stagecoach.rollout_worker.exploration.base import Acted, Exploration, RandomActing, Tensors
from stagecoach.rollout_worker.exploration.own import make_own_exploration
from stagecoach.shared.base.errors import ConfigError, EnvironmentFailure, EnvironmentUnusable, UserError
from stagecoach.shared.config.algorithms.exploration import OwnExploration
from stagecoach.shared.deployment.deployed_policy import DeployedPolicy
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import Leaf, PolicySpaces, SpaceSpec
from stagecoach.shared.policies.distributions import ActionDistribution
from stagecoach.shared.policies.masks import masked
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.registry import build_policies
from tests.conftest import minimal_config
from tests.support.environments.games import NIM, Nim
from tests.support.environments.stage import Stage

TAXI = {"environment": {"id": "Taxi-v4", "action_mask": "info", "num_envs": 4}}
EXPLORATIONS: list[dict[str, Any]] = [
    {"kind": "epsilon_greedy", "epsilon": 0.5},
    {"kind": "boltzmann", "temperature": 0.5},
    {"kind": "parameter_noise", "sigma": 0.5},
    {"kind": "ucb", "coefficient": 1.0, "epsilon": 0.3},
    {"kind": "bootstrapped", "epsilon": 0.3},
]


def choices(sizes: tuple[int, ...]) -> PolicySpaces:
    """MultiDiscrete choices of these sizes, masked, beside a vector that is seen."""
    seen = Leaf("seen", "box", (2,), "float32", low=(-1.0,), high=(1.0,))
    mask = Leaf("action_mask", "box", (sum(sizes),), "int8", low=(0.0,), high=(1.0,), mask=True)
    action = Leaf("", "multi_discrete", (len(sizes),), "int64", nvec=sizes, start=(0,) * len(sizes))
    return PolicySpaces(SpaceSpec((seen, mask), {"dict": {"seen": 0, "action_mask": 1}}), SpaceSpec((action,), 0))


def drawn_masks(sizes: tuple[int, ...], rows: int, seed: int) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(seed)
    masks = [random.random((rows, size)) < 0.5 for size in sizes]
    for mask in masks:
        mask[np.arange(rows), random.integers(mask.shape[1], size=rows)] = True
    return np.concatenate(masks, axis=1)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_masked_distribution_covers_legal_choices(sizes: tuple[int, ...], seed: int) -> None:
    spaces, rows = choices(sizes), 16
    mask = drawn_masks(sizes, rows, seed)
    logits = torch.randn(rows, sum(sizes), generator=torch.Generator().manual_seed(seed % 2**31)).requires_grad_()
    params = masked(logits, {"obs.action_mask": torch.from_numpy(mask.astype(np.int8))}, spaces)
    distribution = ActionDistribution(spaces.action)
    (action,) = distribution.sample(params, torch.Generator().manual_seed(1)).values()
    entropy, log_prob = np.zeros(rows), np.zeros(rows)
    values, first = logits.detach().double().numpy(), 0
    for index, size in enumerate(sizes):
        part = slice(first, first + size)
        shares = np.where(mask[:, part], np.exp(values[:, part]), 0.0)
        shares /= shares.sum(axis=1, keepdims=True)
        taken = shares[np.arange(rows), action[:, index].numpy()]
        assert (taken > 0).all()
        entropy -= np.where(shares > 0, shares * np.log(np.where(shares > 0, shares, 1.0)), 0.0).sum(axis=1)
        log_prob += np.log(taken)
        first += size
    found = distribution.log_prob_and_entropy(params, {"action": action})
    np.testing.assert_allclose(found[0].detach().numpy(), log_prob, atol=1e-5)
    np.testing.assert_allclose(found[1].detach().numpy(), entropy, atol=1e-5)
    assert float(distribution.divergence(params, params).detach().abs().max()) < 1e-6
    torch.autograd.backward(found[0].sum() + found[1].sum())
    assert logits.grad is not None and logits.grad.isfinite().all() and not logits.grad[torch.from_numpy(~mask)].any()


def masked_policy(kind: str, sizes: tuple[int, ...] = (6,), **algorithm: Any) -> Policy:
    spaces = choices(sizes)
    if kind == "dqn":
        action = Leaf("", "discrete", (), "int64", nvec=sizes, start=(0,))
        spaces = PolicySpaces(spaces.observation, SpaceSpec((action,), 0))
    config = minimal_config(algorithm={"name": kind, "minibatch_size": 8, **algorithm})
    return build_policies({"default": spaces}, config.policies, config.algorithm, 0)["default"]


@pytest.mark.parametrize("exploration", EXPLORATIONS, ids=lambda its: str(its["kind"]))
def test_exploration_never_chooses_illegal_actions(exploration: dict[str, Any]) -> None:
    heads: dict[str, Any] = {"heads": 5} if exploration["kind"] in ("ucb", "bootstrapped") else {}
    algorithm = {"name": "dqn", "minibatch_size": 8, "exploration": exploration, **heads}
    policy = masked_policy("dqn", (6,), exploration=exploration, **heads)
    acting = make_exploration(minimal_config(algorithm=algorithm).algorithm.acting, Counters())
    rows = 400
    mask = drawn_masks((6,), rows, 3)
    observations = {"obs.seen": torch.randn(rows, 2), "obs.action_mask": torch.from_numpy(mask.astype(np.int8))}
    if acting.knows_episodes:
        acting.begin(0, 7)
    with torch.no_grad():
        actions, params = acting.act(policy, observations, torch.Generator().manual_seed(0))
        assert mask[np.arange(rows), actions["action"].numpy()].all()
        each = [acting.log_prob(policy, params, {"action": torch.full((rows,), choice)}) for choice in range(6)]
    if exploration["kind"] in ("epsilon_greedy", "boltzmann"):
        total = torch.stack(each, dim=1).exp().masked_fill(torch.from_numpy(~mask), 0.0).sum(dim=1)
        assert torch.allclose(total, torch.ones(rows), atol=1e-5)


def test_warm_up_is_uniform_over_legal_choices() -> None:
    sizes, rows = (4, 3), 3000
    policy, mask = masked_policy("ppo", sizes), np.tile(np.array([1, 0, 1, 1, 0, 1, 1], np.int8), (rows, 1))
    observations = {"obs.seen": torch.zeros(rows, 2), "obs.action_mask": torch.from_numpy(mask)}
    actions, params = RandomActing().act(policy, observations, torch.Generator().manual_seed(0))
    for index, legal in enumerate(([0, 2, 3], [1, 2])):
        counts = np.bincount(actions["action"][:, index].numpy(), minlength=sizes[index])
        assert set(np.flatnonzero(counts).tolist()) == set(legal)
        assert counts[legal].min() > 0.85 * rows / len(legal)
    expected = torch.full((rows,), -float(np.log(6)))
    assert torch.allclose(RandomActing().log_prob(policy, params, actions), expected)


class Careless(Exploration):
    def __init__(self, illegal: bool) -> None:
        self._illegal = illegal

    def act(self, policy: Policy, observations: Tensors, generator: torch.Generator) -> Acted:
        parts = torch.split(observations["obs.action_mask"], [4, 3], dim=1)
        legal = torch.stack([part.float().argmax(dim=1) for part in parts], dim=1)
        return {"action": legal + self._illegal}, torch.zeros(len(legal), 1)


def test_custom_exploration_error_names_illegal_choice() -> None:
    policy, rows = masked_policy("ppo", (4, 3)), 5
    mask = torch.tensor([[1, 0, 1, 1, 0, 1, 0]] * rows, dtype=torch.int8)
    observations = {"obs.seen": torch.zeros(rows, 2), "obs.action_mask": mask}
    for illegal in (False, True):
        config = OwnExploration(kind=f"{__name__}:Careless", kwargs={"illegal": illegal})
        with pytest.raises(ConfigError, match="gave an illegal choice in 'action'") if illegal else nullcontext():
            make_own_exploration(config, {}).act(policy, observations, torch.Generator())


def test_mask_from_info_equals_observed_mask() -> None:
    description = describe_environment(minimal_config(**TAXI))
    spaces = description.policies["default"]
    assert spaces.observation.mask_columns == ("obs.action_mask",)
    stage = Stage(TAXI["environment"])
    columns = stage.sample(40).columns["default"]
    legal = np.take_along_axis(columns["obs.action_mask"], columns["action"][..., None], axis=2)
    assert legal.all() and (columns["obs.action_mask"] == 0).any()


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_mask_without_option_is_rejected(sizes: tuple[int, ...], seed: int) -> None:
    spaces, mask = choices(sizes), np.random.default_rng(seed).random((12, sum(sizes))) < 0.6
    ends = np.cumsum(sizes).tolist()
    expected = [any(not row[end - size : end].any() for size, end in zip(sizes, ends, strict=True)) for row in mask]
    assert spaces.without_legal({"obs.action_mask": mask.astype(np.float32)}).tolist() == expected


def test_missing_info_mask_is_reported_and_tuples_are_joined() -> None:
    told = from_info(np.zeros(2), {"action_mask": (np.array([1, 0]), np.array([0, 1, 1]))}, 5)
    assert told["action_mask"].tolist() == [1, 0, 0, 1, 1] and list(told) == ["observation", "action_mask"]
    assert from_info({"seen": 1}, {"action_mask": [True, False]}, 2)["seen"] == 1
    for info, found in (({}, "found none"), ({"action_mask": [1, 0, 1]}, "found 3 numbers")):
        with pytest.raises(EnvironmentUnusable, match=f"with 2 numbers, {found}; return it from each reset and step"):
            from_info(0, info, 2)


def test_game_moves_are_legal() -> None:
    columns = Stage(NIM | {"num_envs": 4}).sample(80).columns["default"]
    there = columns["mask"]
    assert np.take_along_axis(columns["obs.action_mask"], columns["action"][..., None], axis=2)[there].all()
    assert (columns["reward"][columns["terminated"]] != 0).all()


def test_mask_without_legal_action_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nim, "legal", lambda self: np.zeros(3, np.int8))
    stage = Stage(NIM)
    with pytest.raises(EnvironmentFailure, match="action_mask without a legal action"):
        stage.sample(4)


def test_deployed_policy_accepts_separate_mask() -> None:
    description = describe_environment(minimal_config(**TAXI))
    config = minimal_config(**TAXI)
    policy = DeployedPolicy(build_policies(description.policies, config.policies, config.algorithm, 0)["default"], 0)
    for legal in range(6):
        mask = np.eye(6, dtype=np.int8)[legal]
        assert policy.act(17, action_mask=mask) == policy.act(17, action_mask=mask, greedy=False) == legal
    assert policy.act_batch(np.array([3, 4]), action_mask=np.eye(6, dtype=np.int8)[[2, 5]]).tolist() == [2, 5]
    for asked, says in (
        ({}, "give act"),
        ({"action_mask": np.zeros(6)}, "at least one"),
        ({"action_mask": [1]}, "shape"),
    ):
        with pytest.raises(UserError, match=says):
            policy.act(17, **asked)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"id": "CartPole-v1", "action_mask": "observation"}, "expects default to observe an action_mask of 2 numbers"),
        ({"id": "Pendulum-v1", "action_mask": "info"}, "masks choices, and the action space has none"),
        ({"id": "CartPole-v1", "action_mask": "info", "vectorization": "native"}, "use sync or async"),
    ],
)
def test_missing_mask_is_rejected(environment: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        describe_environment(minimal_config(environment=environment))


class Armed(gymnasium.Env[Any, Any]):
    """Its action is a dict in its own order, its mask one that is sorted; one choice of each is legal."""

    action_space = spaces.Dict(OrderedDict(move=spaces.Discrete(3), attack=spaces.Discrete(3)))

    def __init__(self, names: Sequence[str] = ("move", "attack")) -> None:
        masks = spaces.Dict({name: spaces.Box(0, 1, (3,), np.int8) for name in names})
        self.observation_space = spaces.Dict({"action_mask": masks, "seen": spaces.Box(0, 1, (2,))})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        legal = {"move": np.array([1, 0, 0], np.int8), "attack": np.array([0, 1, 0], np.int8)}
        return {"action_mask": legal, "seen": np.zeros(2, np.float32)}, {}

    def step(self, action: Any) -> Any:
        return self.reset()[0], 0.0, False, False, {}


ARMED = {"id": f"{__name__}:Armed", "num_envs": 2}


def test_nested_masks_match_choices_by_name() -> None:
    stage = Stage(ARMED)
    assert [*stage.description.policies["default"].action.column_names("action")] == ["action.move", "action.attack"]
    columns = stage.sample(20).columns["default"]
    assert (columns["action.move"] == 0).all() and (columns["action.attack"] == 1).all()
    assert (columns["obs.action_mask.attack"] == [0, 1, 0]).all()
    with pytest.raises(ConfigError, match=r"has parts of .*'armour': 3.* expected the same names and sizes, or one"):
        Stage(ARMED | {"kwargs": {"names": ["move", "armour"]}})


def test_mask_of_another_size_is_rejected() -> None:
    stacked = {"wrappers": [{"path": "gymnasium.wrappers:FrameStackObservation", "kwargs": {"stack_size": 2}}]}
    with pytest.raises(ConfigError, match=r"action_mask=auto expects .* of 6 numbers.* has 12"):
        describe_environment(minimal_config(environment=ARMED | stacked))
    free = describe_space(Armed().observation_space), describe_space(spaces.Box(-1, 1, (6,)))
    assert marked(*free, "auto", "one").mask_columns == ()


def test_action_mask_off_observes_the_mask() -> None:
    description = describe_environment(minimal_config(environment=NIM | {"action_mask": "off"}))
    assert description.policies["default"].observation.mask_columns == ()
    assert minimal_config(environment=NIM | yaml.safe_load("action_mask: off")).environment.action_mask == "off"
