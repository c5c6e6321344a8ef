"""Behavioural cloning and IQL compared with TorchRL: losses and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import ValueOperator
from torchrl.objectives import BCLoss, IQLLoss

from shared.algorithm_configs.bc import BCConfig
from shared.spaces import PolicySpaces
from tests.trainer_node.against_others import torchrl_sides as sides
from tests.trainer_node.continuous import moved_apart
from tests.trainer_node.test_iql import BOX, CHOICE, make_iql, minibatch
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.bc import BC, Batch
from trainer_node.algorithms.registry import make_algorithm

pytestmark = pytest.mark.filterwarnings(sides.QUIET)
on_both_spaces = pytest.mark.parametrize("described", [CHOICE, BOX], ids=["choice", "box"])
GAMMA = 0.9


class OneHot(nn.Module):
    """A copy of a critic of ours, told of actions as numbers or as choices."""

    def __init__(self, mlp: nn.Module, choices: int) -> None:
        super().__init__()
        self.mlp = sides.copied(mlp)
        self._choices = choices

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        told = nn.functional.one_hot(action, self._choices).to(torch.float32) if self._choices else action
        found: Tensor = self.mlp(torch.cat([observation, told], dim=-1))
        return found


def parameters_of(policy: Any) -> list[Tensor]:
    deviations = [policy.log_std] if policy.log_std.numel() else []
    return [*deviations, *policy.actor.parameters(), *policy.head.parameters()]


@pytest.mark.filterwarnings("ignore:The name target_actor_network_params wasn't part:UserWarning")  # its own slip
@on_both_spaces
def test_behavioural_cloning(described: PolicySpaces) -> None:
    policy = make_iql(described).policy
    moved_apart(policy)
    bc = make_algorithm(policy, BCConfig(name="bc"), Setting(torch.device("cpu"), 3, 8, 4))
    assert isinstance(bc, BC)
    batch = minibatch(described, 40)
    loss, _ = bc.loss(Batch(batch.observations, batch.actions))
    kind, (actor, _) = sides.distribution_of(described), sides.actor_and_critic(policy)
    told_as = "cross_entropy" if kind == "categorical" else None
    network: Any = sides.actor_of(actor, kind)
    if kind == "categorical":  # it wants the logits in the action's place
        network = TensorDictModule(actor, ["observation"], ["action"])
    theirs = BCLoss(network, loss_function=told_as)
    columns = {"observation": batch.observations["obs"], "action": batch.actions["action"]}
    total = theirs(TensorDict(columns, [40]))["loss_bc"]
    assert loss.item() == pytest.approx(total.item(), rel=1e-4)
    found = sides.gradients(loss, parameters_of(policy))
    sides.same(found, sides.gradients(total, theirs.actor_network_params.parameters()))


@on_both_spaces
def test_iql(described: PolicySpaces) -> None:
    """The bound of its weights, 100, cannot be set in TorchRL; some weights must come to it."""
    iql = make_iql(described, largest_weight=100.0, inverse_temperature=6.0, expectile=0.8)
    moved_apart(iql.policy, iql.critics, iql.targets)
    batch = minibatch(described, 40)
    actor, value = sides.actor_and_critic(iql.policy)
    choices = 4 if described is CHOICE else 0
    critics: Any = [
        ValueOperator(OneHot(critic.get_submodule("mlp"), choices), in_keys=["observation", "action"])
        for critic in iql.critics
    ]
    theirs = IQLLoss(
        sides.actor_of(actor, sides.distribution_of(described)), critics, sides.value_of(value), loss_function="l2",
        temperature=6.0, expectile=0.8,
    )  # fmt: skip
    theirs.make_value_estimator(gamma=GAMMA)
    targets = zip(*(critic.parameters() for critic in iql.targets), strict=True)
    sides.put(theirs.target_qvalue_network_params, [torch.stack(pair) for pair in targets])
    told = theirs(sides.tensordict_of(batch, GAMMA))
    loss, terms = iql.policy_loss(batch)
    q = torch.stack([target(batch.observations, batch.actions, None) for target in iql.targets]).min(dim=0).values
    assert (6.0 * (q - iql.policy.value(batch.observations))).exp().max() > 100, "no weight comes to its bound"
    for name, other in (("train/value_loss", "loss_value"), ("train/policy_loss", "loss_actor")):
        assert float(terms[name]) == pytest.approx(told[other].item(), rel=1e-4)
    total = told["loss_value"] + told["loss_actor"]
    ours = [*parameters_of(iql.policy), *iql.policy.critic.parameters(), *iql.policy.value_head.parameters()]
    params = [*theirs.actor_network_params.parameters(), *theirs.value_network_params.parameters()]
    sides.same(sides.gradients(loss, ours), sides.gradients(total, params))
    critic_loss, _ = iql.critic_loss(batch)
    assert critic_loss.item() == pytest.approx(told["loss_qvalue"].item(), rel=1e-4)
    pairs = zip(*(sides.gradients(critic_loss, critic.parameters()) for critic in iql.critics), strict=True)
    found = sides.gradients(told["loss_qvalue"], theirs.qvalue_network_params.parameters())
    sides.same([torch.stack(pair) for pair in pairs], found)
