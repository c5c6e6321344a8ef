"""RND and GAIL compared with TorchRL: losses and gradients.

GAIL's gradient penalty is on the probability there and on the logit here, as in Gulrajani et al. 2017, and is left out;
curiosity (ICM) has no counterpart. Both are compared with slow NumPy in reward_signals/.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.objectives import GAILLoss, RNDLoss

from tests.trainer_node.against_others import torchrl_sides as sides
from tests.trainer_node.reward_signals.test_gail import make_gail
from tests.trainer_node.reward_signals.test_gail import rows as pairs
from tests.trainer_node.reward_signals.test_rnd import make_rnd, rows


def test_rnd() -> None:
    """TorchRL is given observations as ours are normalised, and all rows instead of its quarter."""
    rnd, batch = make_rnd(), rows(count=40)
    rnd.observe(batch.observations)
    seen = rnd.normaliser("obs", batch.next_observations["obs"])
    predictor, target = (sides.copied(net.encoder.mlp, net.head) for net in (rnd.predictor, rnd.target))
    theirs = RNDLoss(predictor, target, update_fraction=1.0)
    total = theirs(TensorDict({"next": {"observation": seen}}, [40]))["loss_predictor"]
    loss, _ = rnd.loss(batch, torch.Generator())
    assert loss.item() == pytest.approx(total.item(), rel=1e-4)
    sides.same(sides.gradients(loss, rnd.predictor.parameters()), sides.gradients(total, predictor.parameters()))


class Judge(nn.Module):
    """How probable it is that features are of a demonstration."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return torch.sigmoid(self.layers(torch.cat([observation, action], dim=1)))


def test_gail(tmp_path: Path) -> None:
    gail, acted = make_gail(tmp_path, gradient_penalty=0.0), pairs(count=24)
    gail.observe(acted.observations)
    loss, _ = gail.loss(acted, torch.Generator().manual_seed(3))
    shown = gail._demonstrations.draw(24, torch.Generator().manual_seed(3), torch.device("cpu"))
    names = ["observation", "action"]
    theirs = GAILLoss(TensorDictModule(Judge(sides.copied(gail.mlp)), names, ["d_logits"]))
    columns = {}
    for name, part in (("", shown), ("collector_", acted)):
        columns[f"{name}observation"] = gail.normaliser("obs", part.observations["obs"])
        columns[f"{name}action"] = nn.functional.one_hot(part.actions["action"], 4).to(torch.float32)
    total = theirs(TensorDict(columns, [24]))["loss"]
    assert loss.item() == pytest.approx(total.item(), rel=1e-4)
    found = sides.gradients(loss, gail.mlp.parameters())
    sides.same(found, sides.gradients(total, theirs.discriminator_network_params.parameters()))
