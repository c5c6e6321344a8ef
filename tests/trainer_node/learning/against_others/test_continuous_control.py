"""SAC, CQL, TD3 and DDPG compared with TorchRL: critics', policy's and temperature's losses and gradients.

SAC's critic loss is half of TorchRL's: eq. 5 of the paper has the ½ (Haarnoja et al. 2018b). Weights of prioritized
replay count as in test_q_learning.py; TorchRL weights SAC's temperature as well, so that is compared without.
CQL's soft maximum is compared with one action of each source (of more, TorchRL takes it over three at a time) and with
the observation for the next one as well: TorchRL judges the next action there, the authors' code and ours here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from sb3_contrib.common.utils import quantile_huber_loss
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.modules import QValueActor, ValueOperator
from torchrl.objectives import CQLLoss, DDPGLoss, DiscreteCQLLoss, DiscreteSACLoss, SACLoss, TD3Loss

from stagecoach.shared.experience.spaces import PolicySpaces
from stagecoach.trainer_node.learning.algorithms.off_policy import Minibatch
from tests.support.learning import torchrl_sides as sides
from tests.support.learning.algorithms import BOXES, CHOICE, make, move_apart
from tests.support.learning.experience import minibatch

pytestmark = pytest.mark.filterwarnings(sides.QUIET)
GAMMA, ALPHA, ROWS = 0.9, 0.3, 40


def table(batch: Minibatch, algorithm: Any) -> TensorDict:
    """With actions in [-1, 1] where they are of boxes."""
    bounds = getattr(algorithm.policy, "bounds", None)
    return sides.tensordict_of(batch, GAMMA, None if bounds is None else bounds.flat(batch.actions))


def its_critics(algorithm: Any, discrete: bool = False) -> list[Any]:
    """Copies of ours, one by one."""
    layers = [sides.critic_layers(algorithm.critics, which) for which in range(len(algorithm.critics.weights[0]))]
    if discrete:
        return [TensorDictModule(item, ["observation"], ["action_value"]) for item in layers]
    return [ValueOperator(sides.OfBoth(item), in_keys=["observation", "action"]) for item in layers]


def put_targets(theirs: Any, algorithm: Any) -> None:
    sides.put(theirs.target_qvalue_network_params, sides.stacked(algorithm.targets.parameters(), algorithm.critics))


def compare_critics(algorithm: Any, ours: Tensor, loss: Tensor, params: Any) -> None:
    assert ours.item() == pytest.approx(loss.item(), rel=1e-4)
    found = sides.gradients(ours, algorithm.critics.parameters())
    sides.same(sides.stacked(found, algorithm.critics), sides.gradients(loss, params))


def compare_actors(algorithm: Any, ours: Tensor, loss: Tensor, params: Any) -> None:
    assert ours.item() == pytest.approx(loss.item(), rel=1e-4)
    sides.same(sides.gradients(ours, algorithm.policy.parameters()), sides.gradients(loss, params))


def its_sac(sac: Any, described: PolicySpaces) -> Any:
    layers = sides.copied(sac.policy.actor.mlp, sac.policy.head)
    fields: dict[str, Any] = {"loss_function": "l2", "alpha_init": ALPHA}
    if described is CHOICE:
        actor = sides.actor_of(layers, "categorical")
        theirs: Any = DiscreteSACLoss(
            actor, its_critics(sac, True)[0], action_space="categorical", num_actions=4, **fields
        )
        sides.put(theirs.qvalue_network_params, sides.stacked(sac.critics.parameters(), sac.critics))
    else:
        actor = sides.actor_of(sides.Gaussian(layers, None), "tanh_normal")
        theirs = SACLoss(actor, its_critics(sac), target_entropy=-2.0, **fields)
    theirs.make_value_estimator(gamma=GAMMA)
    put_targets(theirs, sac)
    return theirs


@pytest.mark.parametrize("described", [BOXES, CHOICE], ids=["boxes", "choice"])
@pytest.mark.parametrize("weighted", [False, True])
def test_sac(described: PolicySpaces, weighted: bool) -> None:
    """The noise is drawn from equal generators: first for what follows, then for the policy's own actions."""
    entropy = -2.0 if described is BOXES else 0.98 * math.log(4)  # of a choice their default, which is not ours
    sac = make("sac", described, initial_temperature=ALPHA, target_entropy=entropy)
    move_apart(sac.policy, sac.critics, sac.targets)
    theirs = its_sac(sac, described)
    batch = minibatch(described, ROWS, weighted=weighted)
    mean_weight = batch.weight.mean()
    torch.manual_seed(5)
    told = theirs(table(batch, sac))
    torch.manual_seed(5)
    noise = [torch.zeros(0) if described is CHOICE else torch.randn(ROWS, 2) for _ in range(2)]
    critic_loss, values, errors = sac.critic_loss(batch, noise[0])
    actor_loss, entropies = sac.actor_loss(batch, noise[1])
    compare_critics(sac, critic_loss, told["loss_qvalue"] * mean_weight / 2, theirs.qvalue_network_params.parameters())
    compare_actors(sac, actor_loss, told["loss_actor"] * mean_weight, theirs.actor_network_params.parameters())
    assert float(entropies.mean()) == pytest.approx(float(told["entropy"]), rel=1e-4)
    assert float(theirs.target_entropy) == pytest.approx(sac.target_entropy, rel=1e-5)
    if not weighted:
        (wanted,) = torch.autograd.grad(told["loss_alpha"], theirs.log_alpha)
        assert float(entropies.mean() - sac.target_entropy) == pytest.approx(float(wanted), rel=1e-4)
    assert values.shape == errors.shape == (2, ROWS)


@pytest.mark.parametrize("weighted", [False, True])
def test_tqc(weighted: bool) -> None:
    """Written again from the paper's equations, with sb3-contrib's loss of quantiles."""
    tqc = make("tqc", critics=3, quantiles=5, dropped_quantiles=2, initial_temperature=ALPHA)
    move_apart(tqc.policy, tqc.critics, tqc.targets)
    batch, noise = minibatch(BOXES, ROWS, weighted=weighted), torch.randn(2, ROWS, 2)
    critics, targets = (
        [sides.OfBoth(sides.critic_layers(each, which)) for which in range(3)] for each in (tqc.critics, tqc.targets)
    )

    def drawn(seen: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = tqc.policy.action_parameters({"obs": seen}).chunk(2, dim=1)
        raw = mean + log_std.exp() * noise
        density = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi) - (1 - raw.tanh().square()).log()
        return raw.tanh(), density.sum(dim=1, keepdim=True)

    with torch.no_grad():
        action, log_prob = drawn(batch.next_observations["obs"], noise[0])
        pooled = torch.cat([each(batch.next_observations["obs"], action) for each in targets], dim=1).sort(dim=1).values
        target = batch.reward[:, None] + batch.discount[:, None] * (pooled[:, :9] - ALPHA * log_prob)
    taken, rows = tqc.policy.bounds.flat(batch.actions), [slice(row, row + 1) for row in range(ROWS)]
    losses = [
        batch.weight[row] * quantile_huber_loss(predicted[row], target[row], sum_over_quantiles=False)
        for predicted in (each(batch.observations["obs"], taken) for each in critics)
        for row in rows
    ]
    expected = torch.stack(losses).sum() / ROWS
    loss, values, errors = tqc.critic_loss(batch, noise[0])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    wanted = zip(*(sides.gradients(expected, each.parameters()) for each in critics), strict=True)
    found = sides.gradients(loss, tqc.critics.parameters())
    sides.same(sides.stacked(found, tqc.critics), [torch.stack(tensors) for tensors in wanted])
    assert torch.allclose(values - errors, target.mean(dim=1).expand(3, -1), atol=1e-4)
    action, log_prob = drawn(batch.observations["obs"], noise[1])
    value = torch.stack([each(batch.observations["obs"], action) for each in critics]).mean(dim=(0, 2))
    theirs = (batch.weight * (ALPHA * log_prob.squeeze(1) - value)).mean()
    compare_actors(tqc, tqc.actor_loss(batch, noise[1])[0], theirs, tqc.policy.parameters())


def test_temperature_step_equals_adam() -> None:
    sac = make("sac", BOXES, initial_temperature=ALPHA)
    theirs = its_sac(sac, BOXES)
    optimizer = torch.optim.Adam([theirs.log_alpha], lr=1e-2)
    for step in range(3):
        entropy = torch.tensor(0.5 - step)
        optimizer.zero_grad()
        theirs._alpha_loss(log_prob=-entropy.expand(ROWS)).mean().backward()
        optimizer.step()
        sac.move_temperature(entropy, 1e-2, sac.target_entropy)
    found = float(sac.log_temperature.detach())
    assert found == pytest.approx(float(theirs.log_alpha.detach()), rel=1e-5) != pytest.approx(math.log(ALPHA))


def test_cql_of_boxes() -> None:
    """Ours divides the importance-sampled sum by the number of actions, which is a constant; ln π is per unit here."""
    cql = make("cql", BOXES, initial_temperature=ALPHA, considered_actions=1, cloning_steps=9)
    move_apart(cql.policy, cql.critics, cql.targets)
    layers = sides.copied(cql.policy.actor.mlp, cql.policy.head)
    actor = sides.actor_of(sides.Gaussian(layers, None), "tanh_normal")
    theirs = CQLLoss(actor, its_critics(cql), loss_function="l2", alpha_init=ALPHA, target_entropy=-2.0, num_random=1)
    theirs.make_value_estimator(gamma=GAMMA)
    put_targets(theirs, cql)
    batch = minibatch(BOXES, ROWS, weighted=False)
    columns, params = table(batch, cql), list(theirs.qvalue_network_params.parameters())
    torch.manual_seed(5)
    told, _ = theirs.q_loss(columns)
    torch.manual_seed(5)
    ours, values, _ = cql.critic_loss(batch, torch.randn(ROWS, 2))
    compare_critics(cql, ours, told / 2, params)
    columns["next", "observation"] = columns["observation"]
    batch = replace(batch, next_observations=batch.observations)
    torch.manual_seed(6)
    told, _ = theirs.cql_loss(columns)
    drawn = cql.draw(ROWS, torch.Generator().manual_seed(6))
    gap = cql.gaps(batch, values, drawn).mean(dim=1).sum()
    compare_critics(cql, gap + 2 * math.log(3), told, params)
    torch.manual_seed(7)
    told, _ = theirs.actor_bc_loss(columns)
    torch.manual_seed(7)
    ours, _ = cql.actor_loss(batch, torch.randn(ROWS, 2))
    ours = ours - cql.policy.bounds.log_volume
    compare_actors(cql, ours, told, theirs.actor_network_params.parameters())


def test_cql_penalty_of_discrete_actions_equals_torchrl() -> None:
    """In TorchRL it is that of Q-learning, with one network; all else of ours is SAC's."""
    cql, batch = make("cql", CHOICE), minibatch(CHOICE, ROWS, weighted=False)
    move_apart(cql.policy, cql.critics)
    values = cql.actions.value(cql.critics, batch.observations, batch.actions)
    gaps = cql.gaps(batch, values, torch.zeros(0)).mean(dim=1)
    for which in (0, 1):
        network = QValueActor(
            sides.critic_layers(cql.critics, which), in_keys=["observation"], action_space="categorical"
        )
        theirs = DiscreteCQLLoss(network, action_space="categorical")
        theirs.make_value_estimator(gamma=GAMMA)
        told = theirs(table(batch, cql))["loss_cql"]
        assert gaps[which].item() == pytest.approx(told.item(), rel=1e-4)
        found = sides.stacked(sides.gradients(gaps[which], cql.critics.parameters()), cql.critics)
        its = [item for item in theirs.value_network_params.parameters() if item.requires_grad]
        sides.same([tensor[which] for tensor in found], sides.gradients(told, its))


def its_policy(network: nn.Module) -> TensorDictModule:
    policy: Any = network
    return TensorDictModule(sides.copied(policy.actor.mlp, policy.head, nn.Tanh()), ["observation"], ["action"])


@pytest.mark.parametrize("weighted", [False, True])
def test_td3(weighted: bool) -> None:
    td3, batch = make("td3", target_noise=0.4, target_noise_clip=0.5), minibatch(BOXES, ROWS, weighted=weighted)
    move_apart(td3.policy, td3.critics, td3.targets, td3.target_policy)
    theirs = TD3Loss(
        its_policy(td3.policy), its_critics(td3), bounds=(-torch.ones(2), torch.ones(2)), policy_noise=0.4,
        noise_clip=0.5, loss_function="l2",
    )  # fmt: skip
    theirs.make_value_estimator(gamma=GAMMA)
    put_targets(theirs, td3)
    sides.put(theirs.target_actor_network_params, td3.target_policy.parameters())
    torch.manual_seed(7)
    told = theirs(table(batch, td3))
    torch.manual_seed(7)
    noise = torch.randn(ROWS, 2)
    assert (0.4 * noise.abs() > 0.5).any(), "some of the noise is cut"
    ours, mean_weight = td3.critic_loss(batch, noise)[0], batch.weight.mean()
    compare_critics(td3, ours, told["loss_qvalue"] * mean_weight, theirs.qvalue_network_params.parameters())
    compare_actors(
        td3, td3.actor_loss(batch), told["loss_actor"] * mean_weight, theirs.actor_network_params.parameters()
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_ddpg(weighted: bool) -> None:
    ddpg, batch = make("ddpg"), minibatch(BOXES, ROWS, weighted=weighted)
    move_apart(ddpg.policy, ddpg.critics, ddpg.targets, ddpg.target_policy)
    theirs = DDPGLoss(its_policy(ddpg.policy), its_critics(ddpg)[0], loss_function="l2", delay_actor=True)
    theirs.make_value_estimator(gamma=GAMMA)
    flat = sides.stacked(ddpg.targets.parameters(), ddpg.critics)
    sides.put(theirs.target_value_network_params, [tensor[0] for tensor in flat])
    sides.put(theirs.target_actor_network_params, ddpg.target_policy.parameters())
    told, mean_weight = theirs(table(batch, ddpg)), batch.weight.mean()
    ours = ddpg.critic_loss(batch, torch.randn(ROWS, 2))[0]
    loss = told["loss_value"] * mean_weight
    assert ours.item() == pytest.approx(loss.item(), rel=1e-4)
    found = sides.stacked(sides.gradients(ours, ddpg.critics.parameters()), ddpg.critics)
    sides.same([tensor[0] for tensor in found], sides.gradients(loss, theirs.value_network_params.parameters()))
    compare_actors(
        ddpg, ddpg.actor_loss(batch), told["loss_actor"] * mean_weight, theirs.actor_network_params.parameters()
    )
