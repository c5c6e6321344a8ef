"""IQL compared with TorchRL: losses and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torchrl.modules import ValueOperator
from torchrl.objectives import IQLLoss

from stagecoach.shared.experience.spaces import PolicySpaces
from tests.support.learning import torchrl_sides as sides
from tests.support.learning.algorithms import CHOICE, make, move_apart, on_both_spaces
from tests.support.learning.experience import minibatch

pytestmark = pytest.mark.filterwarnings(sides.QUIET)
GAMMA = 0.9


@on_both_spaces
def test_iql(described: PolicySpaces) -> None:
    """The bound of the weights, 100, cannot be set in TorchRL."""
    iql = make("iql", described, largest_weight=100.0, inverse_temperature=6.0, expectile=0.8)
    move_apart(iql.policy, iql.critics, iql.targets)
    with torch.no_grad():
        iql.targets.biases[-1].add_(1.5)
    batch = minibatch(described, 40, weighted=False)
    batch = replace(batch, discount=GAMMA * (batch.discount > 0))  # in TorchRL it knows single steps only
    actor, value = sides.actor_and_critic(iql.policy)
    choices = 4 if described is CHOICE else 0
    critics: Any = [
        ValueOperator(sides.OfBoth(sides.critic_layers(iql.critics, which), choices), in_keys=["observation", "action"])
        for which in (0, 1)
    ]
    theirs = IQLLoss(
        sides.actor_of(actor, sides.distribution_of(described)), critics, sides.value_of(value), loss_function="l2",
        temperature=6.0, expectile=0.8,
    )  # fmt: skip
    theirs.make_value_estimator(gamma=GAMMA)
    sides.put(theirs.target_qvalue_network_params, sides.stacked(iql.targets.parameters(), iql.critics))
    told = theirs(sides.tensordict_of(batch, GAMMA))
    loss, terms = iql.policy_loss(batch)
    q = iql.q(iql.targets, batch.observations, batch.actions).min(dim=0).values
    weight = (6.0 * (q - iql.policy.value(batch.observations))).exp()
    assert 0 < (weight > 100).sum() < 40, "some come to the bound"
    for name, other in (("train/value_loss", "loss_value"), ("train/policy_loss", "loss_actor")):
        assert float(terms[name]) == pytest.approx(told[other].item(), rel=1e-4)
    total = told["loss_value"] + told["loss_actor"]
    params = [*theirs.actor_network_params.parameters(), *theirs.value_network_params.parameters()]
    sides.same(sides.gradients(loss, sides.parameters_of(iql.policy)), sides.gradients(total, params))
    critic_loss, _ = iql.critic_loss(batch)
    assert critic_loss.item() == pytest.approx(told["loss_qvalue"].item(), rel=1e-4)
    found = sides.stacked(sides.gradients(critic_loss, iql.critics.parameters()), iql.critics)
    sides.same(found, sides.gradients(told["loss_qvalue"], theirs.qvalue_network_params.parameters()))
