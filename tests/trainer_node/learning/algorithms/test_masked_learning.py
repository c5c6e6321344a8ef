"""Learning with action masks: losses and targets are those over the legal choices alone, and exports act so too."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical

from stagecoach.shared.config.algorithms.registry import ALGORITHMS
from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.deployment.deployed_policy import DeployedPolicy
from stagecoach.shared.experience.spaces import Leaf, PolicySpaces, SpaceSpec
from stagecoach.shared.policies.actor_critic import ActorCritic, RecurrentActorCritic
from stagecoach.shared.policies.continuous import Actor
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.q_network import QNetwork
from stagecoach.shared.policies.serialization import decode_policy, encode_policy
from stagecoach.trainer_node.export import compare, random_observations, to_onnx
from stagecoach.trainer_node.learning.algorithms.off_policy import Minibatch
from stagecoach.trainer_node.learning.building_blocks.batch import Batch
from tests.support.learning.algorithms import make, move_apart
from tests.support.learning.experience import weights_after_updates

CHOICES, ROWS = 5, 40
ONE = (Leaf("", "discrete", (), "int64", nvec=(CHOICES,), start=(0,)),)
SEVERAL = (
    Leaf("arm", "box", (2,), "float32", low=(-1.0,), high=(1.0,)),
    Leaf("flags", "multi_binary", (2,), "int8", nvec=(2, 2), start=(0, 0)),
    Leaf("gears", "multi_discrete", (2,), "int64", nvec=(2, 3), start=(5, 0)),
)


def masked(action: tuple[Leaf, ...] = ONE) -> PolicySpaces:
    size = sum(sum(leaf.nvec) for leaf in action)
    seen = Leaf("seen", "box", (3,), "float32", low=(-1.0,), high=(1.0,))
    mask = Leaf("action_mask", "box", (size,), "int8", low=(0.0,), high=(1.0,), mask=True)
    nested = {"dict": {leaf.path: number for number, leaf in enumerate(action)}} if len(action) > 1 else 0
    return PolicySpaces(SpaceSpec((mask, seen), {"dict": {"action_mask": 0, "seen": 1}}), SpaceSpec(action, nested))


def observed(seed: int, rows: int = ROWS, size: int = CHOICES, none: bool = False) -> dict[str, Tensor]:
    """With masks of any number of legal choices; where `none`, some of them have no legal one."""
    random = np.random.default_rng(seed)
    mask = random.random((rows, size)) < 0.5
    if not none:
        mask[np.arange(rows), random.integers(size, size=rows)] = True
    return {"obs.action_mask": torch.from_numpy(mask.astype(np.int8)), "obs.seen": torch.randn(rows, 3)}


def legal_of(observations: dict[str, Tensor], row: int) -> list[int]:
    """The numbers of the legal choices, or of all where there is none."""
    found = np.flatnonzero(observations["obs.action_mask"][row].numpy()).tolist()
    return found or list(range(CHOICES))


def drawn_legal(observations: dict[str, Tensor]) -> Tensor:
    random = np.random.default_rng(8)
    return torch.tensor([random.choice(legal_of(observations, row)) for row in range(ROWS)])


def transitions() -> Minibatch:
    """Of legal actions; after some of them nothing is legal."""
    torch.manual_seed(4)
    here, there = observed(1), observed(2, none=True)
    actions = {"action": drawn_legal(here)}
    discount = torch.where(torch.arange(ROWS) % 4 == 0, 0.0, 0.9)
    return Minibatch(here, actions, there, torch.randn(ROWS), discount, torch.ones(ROWS))


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        *({"head": head, "atoms": 7, "v_min": -3.0, "v_max": 3.0} for head in ("c51", "hl_gauss")),
        {"head": "qr", "quantiles": 4},
        {"heads": 3},
    ],
    ids=str,
)
def test_q_learning_bootstraps_from_the_best_legal_choice(fields: dict[str, Any], double: bool) -> None:
    dqn, batch = make("dqn", masked(), double=double, **fields), transitions()
    move_apart(dqn.policy, dqn.target)
    heads = dqn.policy.heads
    with torch.no_grad():
        outputs = dqn.target.outputs(batch.next_observations).unflatten(0, (heads, ROWS))
        judged = (dqn.policy if double else dqn.target).outputs(batch.next_observations).unflatten(0, (heads, ROWS))
        values = dqn.policy.means(judged).numpy()
    expected = [
        outputs[head, row, max(legal_of(batch.next_observations, row), key=lambda at: values[head, row, at])]
        for head in range(heads)
        for row in range(ROWS)
    ]
    assert torch.equal(dqn.bootstrap(batch, None, None), torch.stack(expected))
    loss, _ = dqn.loss(batch)
    loss.backward()
    assert all(torch.isfinite(its.grad).all() for its in dqn.policy.parameters() if its.grad is not None)


def test_ppos_loss_is_that_of_a_softmax_over_the_legal_choices() -> None:
    torch.manual_seed(1)
    ppo = make("ppo", masked(), normalize_advantages=False, entropy_coefficient=0.1)
    move_apart(ppo.policy)
    seen = observed(3)
    actions, old, (advantage, target, value) = drawn_legal(seen), -1 - torch.rand(ROWS), torch.randn(3, ROWS)
    loss, _ = ppo.loss(Batch(seen, {"action": actions}, old, value, advantage, target), 0.2)
    loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in ppo.policy.named_parameters() if parameter.numel()}
    ppo.policy.zero_grad()
    logits = ppo.policy.head(ppo.policy.actor(seen, None))
    each: list[Any] = [Categorical(logits=logits[row, legal_of(seen, row)]) for row in range(ROWS)]
    at = [torch.tensor(legal_of(seen, row).index(int(actions[row]))) for row in range(ROWS)]
    log_prob = torch.stack([of.log_prob(taken) for of, taken in zip(each, at, strict=True)])
    entropy = torch.stack([of.entropy() for of in each]).mean()
    ratio = (log_prob - old).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    errors, coefficient = (ppo.policy.value(seen) - target).square().mean(), ppo._config.value_coefficient
    expected = -surrogate + coefficient * errors - 0.1 * entropy
    torch.testing.assert_close(loss, expected)
    torch.autograd.backward(expected)
    for name, parameter in ppo.policy.named_parameters():
        if parameter.numel():
            torch.testing.assert_close(found[name], parameter.grad, msg=name)


def test_sac_target_entropy_counts_legal_choices() -> None:
    sac, seen = make("sac", masked()), observed(1, none=True)
    expected = []
    for row in range(ROWS):
        count = len(legal_of(seen, row))
        greedy = np.full(count, 0.1 / count) + 0.9 * (np.arange(count) == 0)
        expected.append(-(greedy * np.log(greedy)).sum())
    assert (
        float(sac.actions.target_entropy_of(seen)) == pytest.approx(np.mean(expected), rel=1e-5) != sac.target_entropy
    )


@pytest.mark.parametrize("name", ["sac", "cql"])
def test_soft_critics_know_only_legal_choices(name: str) -> None:
    algorithm, batch = make(name, masked()), transitions()
    move_apart(algorithm.policy, algorithm.critics)
    nothing, policy = torch.zeros(0), algorithm.policy
    found = algorithm.actions.consider(algorithm.critics, batch.observations, nothing)
    logits = policy.head(policy.actor(batch.observations, policy.normalizer))
    values = algorithm.critics(batch.observations, policy.normalizer, None)
    for row in range(ROWS):
        legal = legal_of(batch.observations, row)
        share = logits[row, legal].softmax(dim=0)
        soft = (share * (values[:, row, legal].amin(dim=0) - share.log())).sum()
        torch.testing.assert_close(found.expectation(found.value - found.log_prob)[row], soft)
        if name == "cql":
            expected = values[:, row, legal].logsumexp(dim=1)
            torch.testing.assert_close(algorithm.soft_maximum(batch, nothing)[:, row], expected)
    loss, _ = algorithm.actor_loss(batch, nothing)
    loss.backward()
    assert all(torch.isfinite(its.grad).all() for its in policy.parameters())


UNMASKED = ("td3", "td3_bc", "ddpg", "tqc", "vdn", "qmix")


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in UNMASKED])
def test_weights_stay_finite_with_arbitrary_masks(name: str) -> None:
    """Random fragments: their actions may be illegal, and masks may have no legal choice."""
    arrays = weights_after_updates(make(name, masked()))
    assert all(np.isfinite(array).all() for array in arrays.values())


PLAIN = PolicyConfig(hidden_sizes=(8,), normalize_observations=True)
KINDS: dict[str, Policy] = {
    "actor_critic": ActorCritic(masked(SEVERAL), PLAIN),
    "lstm": RecurrentActorCritic(
        masked(SEVERAL), PLAIN.model_copy(update={"core": "lstm", "core_size": 8, "share_encoder": True})
    ),
    "ensemble": QNetwork(masked(), PLAIN, heads=3),
    "discrete sac": Actor(masked(), PLAIN),
}


@pytest.mark.parametrize("kind", KINDS)
def test_exported_policy_takes_mask_and_acts_as_deployed(kind: str) -> None:
    policy = KINDS[kind].eval()
    deployed, data = DeployedPolicy(*decode_policy(encode_policy(policy, 3))), to_onnx(policy, {})
    told = compare(policy, data, list(random_observations(policy.spaces.observation)))
    assert told.other_choices == 0 and told.max_difference < 1e-4
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    sizes = [options for leaf in policy.spaces.action.leaves for options in leaf.nvec]
    mask = torch.cat([observed(seed, size=size)["obs.action_mask"] for seed, size in enumerate(sizes)], dim=1).numpy()
    seen = np.random.default_rng(2).normal(size=(ROWS, 3)).astype(np.float32)
    fed = {"obs.action_mask": mask, "obs.seen": seen}
    fed |= {"state_in": np.zeros((ROWS, policy.state_size), np.float32)} if policy.state_size else {}
    found = dict(zip([item.name for item in session.get_outputs()], session.run(None, fed), strict=True))
    acted = policy.spaces.action.flatten("action", deployed.act_batch({"seen": seen}, action_mask=mask))
    first = 0
    for leaf in policy.spaces.action.leaves:
        name = leaf.column("action")
        np.testing.assert_allclose(found[name] - (leaf.starts() if any(leaf.start) else 0), acted[name], atol=1e-5)
        for index, options in enumerate(leaf.nvec):
            chosen = acted[name].reshape(ROWS, -1)[:, index]
            assert mask[np.arange(ROWS), first + chosen].all()
            first += options
