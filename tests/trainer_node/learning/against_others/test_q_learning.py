"""DQN and the heads of Rainbow: expected values and C51 compared with TorchRL, quantiles with Stable-Baselines3.

Minibatches hold n-step rewards and their discounts, ends, and weights of prioritized replay. TorchRL divides a weighted
sum by the sum of the weights; here, as in the paper, each weight scales its own gradient and the mean is over the
minibatch. Noise on weights is tested in test_q_network.py and by finite differences in test_dqn.py.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from sb3_contrib.common.utils import quantile_huber_loss
from torch import Tensor, nn
from torchrl.modules import DistributionalQValueActor, QValueActor
from torchrl.objectives import DistributionalDQNLoss, DQNLoss

from stagecoach.trainer_node.learning.algorithms.dqn import DQN
from stagecoach.trainer_node.learning.algorithms.off_policy import Minibatch
from tests.support.learning import torchrl_sides as sides
from tests.support.learning.algorithms import make_dqn, move_apart
from tests.support.learning.experience import minibatch
from tests.support.learning.streams import PLAIN

pytestmark = pytest.mark.filterwarnings(sides.QUIET)
dueling_or_not = pytest.mark.parametrize("dueling", [False, True], ids=["one stream", "dueling"])
GAMMA = 0.9


class Streams(nn.Module):
    """A copy of the network: values `[B, A]`, or logits `[B, atoms, A]` as TorchRL has them."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.advantage = self._plain(policy.advantage)
        self.value = None if policy.value is None else self._plain(policy.value)
        self._shape = (policy.choices, policy.width)

    def _plain(self, stream: Any) -> nn.Sequential:
        first, last = sides.copied(*stream.layers)
        return nn.Sequential(first, nn.Tanh(), last)

    def outputs(self, observation: Tensor) -> Tensor:
        """`[B, A, width]`."""
        found: Tensor = self.advantage(observation).unflatten(-1, self._shape)
        if self.value is not None:
            found = found - found.mean(dim=-2, keepdim=True) + self.value(observation).unsqueeze(-2)
        return found

    def forward(self, observation: Tensor) -> Tensor:
        outputs = self.outputs(observation)
        return outputs.squeeze(-1) if self._shape[1] == 1 else outputs.transpose(-1, -2).log_softmax(dim=-2)


def its_network(dqn: DQN) -> Any:
    """Its actor upon a copy of ours."""
    named: dict[str, Any] = {"in_keys": ["observation"], "action_space": "categorical"}
    if dqn.policy.head == "expected":
        return QValueActor(Streams(dqn.policy), **named)
    return DistributionalQValueActor(Streams(dqn.policy), **named, support=dqn.policy.support.clone())


def compare(dqn: DQN, theirs: Any) -> tuple[Tensor, Tensor]:
    """Loss and gradients; answers what each makes priorities of."""
    target = Streams(dqn.target)
    sides.put(theirs.target_value_network_params["module"]["0"]["module"], target.parameters())
    batch = minibatch(PLAIN, 60)
    table = sides.tensordict_of(batch, GAMMA)
    loss, lesson = dqn.loss(batch)
    total = theirs(table)["loss"] * batch.weight.mean()
    assert loss.item() == pytest.approx(total.item(), rel=1e-4)
    params = [item for item in theirs.value_network_params.parameters() if item.requires_grad]
    sides.same(sides.gradients(loss, dqn.policy.parameters()), sides.gradients(total, params))
    return lesson.td_error, table["td_error"].reshape(-1)


@dueling_or_not
@pytest.mark.parametrize(("loss", "its"), [("huber", "smooth_l1"), ("squared", "l2")])
@pytest.mark.parametrize("double", [False, True])
def test_expected_values(double: bool, loss: str, its: str, dueling: bool) -> None:
    dqn = make_dqn(double=double, dueling=dueling, loss=loss)
    move_apart(dqn.policy, dqn.target)
    theirs = DQNLoss(its_network(dqn), loss_function=its, double_dqn=double, action_space="categorical")
    theirs.make_value_estimator(gamma=GAMMA)
    ours, squares = compare(dqn, theirs)
    torch.testing.assert_close(ours.square(), squares, rtol=1e-3, atol=1e-5)


@dueling_or_not
def test_c51(dueling: bool) -> None:
    """Theirs is always double; its priority is the cross-entropy, of which ours (as Rainbow's) leaves a part out."""
    dqn = make_dqn(head="c51", atoms=7, v_min=-3.0, v_max=3.0, double=True, dueling=dueling)
    move_apart(dqn.policy, dqn.target)
    divergence, cross_entropy = compare(dqn, DistributionalDQNLoss(its_network(dqn), gamma=GAMMA))
    assert (divergence <= cross_entropy + 1e-5).all() and (divergence > 0).all()


def outputs_of(dqn: DQN, double: bool) -> tuple[Streams, Minibatch, Tensor, Tensor, Tensor]:
    """A copy of the network; a minibatch, and outputs for what was done, and of all choices afterwards: of the network
    that chooses, and of the target."""
    batch, online = minibatch(PLAIN, 60), Streams(dqn.policy)
    (seen,), (after,) = batch.observations.values(), batch.next_observations.values()
    predicted = online.outputs(seen)[torch.arange(60), batch.actions["action"]]
    with torch.no_grad():
        following = Streams(dqn.target).outputs(after)
        return online, batch, predicted, online.outputs(after) if double else following, following


@dueling_or_not
@pytest.mark.parametrize("double", [False, True])
def test_quantiles(double: bool, dueling: bool) -> None:
    """Stable-Baselines3's QR-DQN on copies of the network; the choice of the action is its greedy one, by the mean."""
    dqn = make_dqn(head="qr", quantiles=5, double=double, dueling=dueling)
    move_apart(dqn.policy, dqn.target)
    online, batch, predicted, judged, following = outputs_of(dqn, double)
    greedy = judged.mean(dim=2).argmax(dim=1)
    wanted = following[torch.arange(60), greedy] * batch.discount.unsqueeze(1) + batch.reward.unsqueeze(1)
    rows = zip(predicted.unsqueeze(1), wanted.unsqueeze(1), strict=True)
    each = torch.stack([quantile_huber_loss(one, other, sum_over_quantiles=True) for one, other in rows])
    loss, _ = dqn.loss(batch)
    total = (batch.weight * each).mean()
    assert loss.item() == pytest.approx(total.item(), rel=1e-4)
    sides.same(sides.gradients(loss, dqn.policy.parameters()), sides.gradients(total, online.parameters()))


@dueling_or_not
@pytest.mark.parametrize("double", [False, True])
def test_hl_gauss(double: bool, dueling: bool) -> None:
    """The paper's listing, class by class, with the error function of the standard library."""
    dqn = make_dqn(head="hl_gauss", atoms=7, v_min=-1.5, v_max=1.5, smoothing=0.6, double=double, dueling=dueling)
    move_apart(dqn.policy, dqn.target)
    online, batch, logits, *outputs = outputs_of(dqn, double)
    middles, sigma = torch.linspace(-1.5, 1.5, 7), 0.6 * 0.5
    judged, following = (each.softmax(dim=2) @ middles for each in outputs)
    wanted = batch.reward + batch.discount * following[torch.arange(60), judged.argmax(dim=1)]
    assert (wanted.abs() > 1.5).any() and (wanted.abs() < 1.5).any()
    losses = []
    for value, row in zip(wanted.tolist(), logits, strict=True):
        within = min(max(value, -1.5), 1.5)
        below = [math.erf((edge - within) / (math.sqrt(2) * sigma)) for edge in torch.linspace(-1.75, 1.75, 8).tolist()]
        shares = [(high - low) / (below[-1] - below[0]) for low, high in pairwise(below)]
        losses.append(-(torch.tensor(shares) * row.log_softmax(dim=0)).sum())
    loss, lesson = dqn.loss(batch)
    total = (batch.weight * torch.stack(losses)).mean()
    assert loss.item() == pytest.approx(total.item(), rel=1e-4)
    sides.same(sides.gradients(loss, dqn.policy.parameters()), sides.gradients(total, online.parameters()))
    torch.testing.assert_close(lesson.td_error, wanted - logits.detach().softmax(dim=1) @ middles, rtol=1e-3, atol=1e-4)
