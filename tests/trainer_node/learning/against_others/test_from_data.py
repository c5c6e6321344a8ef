"""Behavioral cloning and IQL compared with TorchRL: losses and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrl.modules import ValueOperator
from torchrl.objectives import IQLLoss

from stagecoach.shared.experience.spaces import PolicySpaces
from tests.support.learning import torchrl_sides as sides
from tests.support.learning.algorithms import BOXES, CHOICE, make, move_apart
from tests.support.learning.experience import minibatch

pytestmark = pytest.mark.filterwarnings(sides.QUIET)
on_both_spaces = pytest.mark.parametrize("described", [CHOICE, BOXES], ids=["choice", "boxes"])
GAMMA = 0.9


class OneHot(nn.Module):
    """A copy of a critic of ours, told of actions as numbers or as choices."""

    def __init__(self, layers: nn.Module, choices: int) -> None:
        super().__init__()
        self.layers, self._choices = layers, choices

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        told = nn.functional.one_hot(action, self._choices).to(torch.float32) if self._choices else action
        found: Tensor = self.layers(torch.cat([observation, told], dim=-1))
        return found


def parameters_of(policy: Any) -> list[Tensor]:
    deviations = [policy.log_std] if policy.log_std.numel() else []
    return [*deviations, *policy.actor.parameters(), *policy.head.parameters()]


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
        ValueOperator(OneHot(sides.critic_layers(iql.critics, which), choices), in_keys=["observation", "action"])
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
    ours = [*parameters_of(iql.policy), *iql.policy.critic.parameters(), *iql.policy.value_head.parameters()]
    params = [*theirs.actor_network_params.parameters(), *theirs.value_network_params.parameters()]
    sides.same(sides.gradients(loss, ours), sides.gradients(total, params))
    critic_loss, _ = iql.critic_loss(batch)
    assert critic_loss.item() == pytest.approx(told["loss_qvalue"].item(), rel=1e-4)
    found = sides.stacked(sides.gradients(critic_loss, iql.critics.parameters()), iql.critics)
    sides.same(found, sides.gradients(told["loss_qvalue"], theirs.qvalue_network_params.parameters()))
