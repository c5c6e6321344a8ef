"""Our networks and batches as TorchRL's losses take them.

Weights are copied into plain layers, so that networks agree and only what is made of their outputs is compared:
distributions, targets, losses and the gradients that come back are TorchRL's own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torchrl.modules import IndependentNormal, TanhNormal, ValueOperator

from stagecoach.shared.experience.spaces import PolicySpaces
from stagecoach.shared.policies.actor_critic import ActorCritic
from stagecoach.trainer_node.learning.algorithms.off_policy import Minibatch
from stagecoach.trainer_node.learning.building_blocks.critics import Critics

QUIET = "ignore:No target network updater has been associated:UserWarning"
"""Targets are put in by hand here; TorchRL warns of that."""


class Gaussian(nn.Module):
    """Means of the layers, and deviations: a parameter, or the layers' second half."""

    def __init__(self, layers: nn.Module, log_std: Tensor | None) -> None:
        super().__init__()
        self.layers = layers
        self.log_std = None if log_std is None else nn.Parameter(log_std.detach().clone())

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.layers(observation)
        if self.log_std is not None:
            return outputs, self.log_std.exp().expand_as(outputs)
        mean, log_std = outputs.chunk(2, dim=-1)
        return mean, log_std.exp()


class OfBoth(nn.Module):
    """A critic of observation and action, which is one of so many `choices`, or numbers if there are none."""

    def __init__(self, layers: nn.Module, choices: int = 0) -> None:
        super().__init__()
        self.layers, self._choices = layers, choices

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        told = nn.functional.one_hot(action, self._choices).to(torch.float32) if self._choices else action
        found: Tensor = self.layers(torch.cat([observation, told], dim=-1))
        return found


def copied(*layers: nn.Module) -> nn.Sequential:
    """Copies of the networks in a row; parameters come in the order of the layers."""
    return nn.Sequential(*copy.deepcopy(layers))


def actor_of(network: nn.Module, kind: str) -> ProbabilisticTensorDictSequential:
    """`network` under a distribution of TorchRL: `categorical`, `normal` or `tanh_normal`."""
    names = ["logits"] if kind == "categorical" else ["loc", "scale"]
    classes = {"categorical": torch.distributions.Categorical, "normal": IndependentNormal, "tanh_normal": TanhNormal}
    drawn = ProbabilisticTensorDictModule(
        in_keys=names, out_keys=["action"], distribution_class=classes[kind], return_log_prob=True
    )
    return ProbabilisticTensorDictSequential(TensorDictModule(network, ["observation"], names), drawn)


def actor_and_critic(policy: ActorCritic) -> tuple[nn.Module, nn.Module]:
    """Copies of an actor-critic's two networks."""
    layers = copied(policy.actor.mlp, policy.head)
    boxes = any(leaf.kind == "box" for leaf in policy.spaces.action.leaves)
    return Gaussian(layers, policy.log_std) if boxes else layers, copied(policy.critic.mlp, policy.value_head)


def parameters_of(policy: ActorCritic) -> list[Tensor]:
    """Parameters of the two networks; the deviations of Gaussians, which TorchRL has last, stand first with us."""
    deviations = [policy.log_std] if policy.log_std.numel() else []
    layers = (policy.actor, policy.head, policy.critic, policy.value_head)
    return [*deviations, *(tensor for layer in layers for tensor in layer.parameters())]


def distribution_of(spaces: PolicySpaces) -> str:
    return "normal" if spaces.action.leaves[0].kind == "box" else "categorical"


def value_of(network: nn.Module) -> ValueOperator:
    return ValueOperator(network, in_keys=["observation"])


def critic_layers(critics: Critics, which: int) -> nn.Sequential:
    """A copy of one of our critics as plain layers."""
    layers: list[nn.Module] = []
    for weight, bias in zip(critics.weights, critics.biases, strict=True):
        layer = nn.Linear(*weight.shape[1:])
        with torch.no_grad():
            layer.weight.copy_(weight[which].T)
            layer.bias.copy_(bias[which, 0])
        layers += [layer, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def stacked(tensors: Iterable[Tensor], critics: Critics) -> list[Tensor]:
    """Weights and biases of our critics (or their gradients, in this order) as TorchRL stacks its own."""
    given, layers = list(tensors), len(critics.weights)
    pairs = zip(given[:layers], given[layers:], strict=True)
    return [tensor for weight, bias in pairs for tensor in (weight.transpose(1, 2), bias.squeeze(1))]


def put(targets: Any, tensors: Iterable[Tensor]) -> None:
    """Makes these the parameters of a target network of TorchRL's."""
    for target, tensor in zip(targets.values(True, True), tensors, strict=True):
        assert target.shape == tensor.shape
        target.data.copy_(tensor)


def gradients(loss: Tensor, parameters: Iterable[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(parameters), retain_graph=True))


def same(ours: Iterable[Tensor], theirs: Iterable[Tensor], rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """All equal but for rounding, and not all zero."""
    ours, theirs = list(ours), list(theirs)
    assert len(ours) == len(theirs) and max(float(tensor.abs().max()) for tensor in ours) > 1e-4
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def tensordict_of(batch: Minibatch, gamma: float, action: Tensor | None = None) -> TensorDict:
    """A minibatch, whose discounts are 0 or powers of `gamma`; `action` in their units."""
    steps = (batch.discount.clamp_min(1e-9).log() / torch.tensor(gamma).log()).round()
    ended = (batch.discount == 0).unsqueeze(1)
    (seen,), (after,), (taken,) = (
        columns.values() for columns in (batch.observations, batch.next_observations, batch.actions)
    )
    following = {"observation": after, "reward": batch.reward.unsqueeze(1), "done": ended, "terminated": ended.clone()}
    columns = {
        "observation": seen, "action": taken if action is None else action, "next": following,
        "steps_to_next_obs": steps.unsqueeze(1), "priority_weight": batch.weight,
    }  # fmt: skip
    return TensorDict(columns, [len(batch)])
