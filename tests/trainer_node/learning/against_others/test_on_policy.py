"""PPO, APPO, A2C, IMPALA and MAPPO compared with TorchRL: batches with its GAE and V-trace, losses and gradients.

APPO against its target network is TorchRL's decoupled objective of PPO with the target as the proximal policy, where no
weight is cut (ρ̄ beyond all ratios). The divergence that APPO may add has no counterpart there.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.modules import PopArtValueNorm
from torchrl.objectives import A2CLoss, ClipPPOLoss
from torchrl.objectives.multiagent import MAPPOLoss
from torchrl.objectives.value.functional import generalized_advantage_estimate, vtrace_advantage_estimate

from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import Columns, PolicySpaces
from stagecoach.shared.policies.actor_critic import ActorCritic
from stagecoach.trainer_node.learning.algorithms.on_policy import OnPolicy
from stagecoach.trainer_node.learning.building_blocks.batch import Batch
from stagecoach.trainer_node.learning.building_blocks.team import with_team
from tests.support.learning import torchrl_sides as sides
from tests.support.learning.algorithms import make, older, on_both_spaces
from tests.support.learning.experience import acted, advantage_batch, received, update_batch

pytestmark = pytest.mark.filterwarnings(sides.QUIET)
COEFFICIENTS: dict[str, Any] = {"entropy_coefficient": 0.05, "value_coefficient": 0.7}
ITS: dict[str, Any] = {"entropy_coeff": 0.05, "critic_coeff": 0.7, "loss_critic_type": "l2"}


def table(batch: Batch) -> TensorDict:
    """A minibatch with its advantages and targets."""
    columns = {
        "observation": batch.observations["obs"], "action": batch.actions["action"], "action_log_prob": batch.log_prob,
        "advantage": batch.advantage.unsqueeze(1), "value_target": batch.target.unsqueeze(1),
        "state_value": batch.value.unsqueeze(1),
    }  # fmt: skip
    return TensorDict(columns, [len(batch)])


def compare(algorithm: OnPolicy, loss: Tensor, theirs: Any, rows: TensorDict, rel: float = 1e-4) -> None:
    """The whole loss and all gradients."""
    told = theirs(rows)
    total = told["loss_objective"] + told["loss_critic"] + told["loss_entropy"]
    assert loss.item() == pytest.approx(total.item(), rel=rel)
    ours = sides.parameters_of(algorithm.policy)
    params = [*theirs.actor_network.parameters(), *theirs.critic_network.parameters()]
    assert [one.shape for one in ours] == [one.shape for one in params]
    of_theirs = [*theirs.actor_network_params.parameters(), *theirs.critic_network_params.parameters()]
    found = sides.gradients(loss, ours)
    assert min(float(tensor.abs().max()) for tensor in found) > 1e-5
    sides.same(found, sides.gradients(total, of_theirs), 2 * rel, rel / 100)


def networks(policy: ActorCritic) -> tuple[Any, Any]:
    actor, critic = sides.actor_and_critic(policy)
    return sides.actor_of(actor, sides.distribution_of(policy.spaces)), sides.value_of(critic)


@on_both_spaces
@pytest.mark.parametrize(
    ("changes", "its"),
    [
        ({}, {"normalize_advantage": True}),
        ({"normalize_advantages": False}, {}),
        ({"normalize_advantages": False, "clip_range_value": 0.3}, {"clip_value": 0.3}),
    ],
    ids=["plain", "raw advantages", "value clipping"],
)
def test_ppos_loss(described: PolicySpaces, changes: dict[str, Any], its: dict[str, Any]) -> None:
    ppo = make("ppo", described, **COEFFICIENTS, **changes)
    batch = advantage_batch(ppo.policy)
    theirs = ClipPPOLoss(*networks(ppo.policy), clip_epsilon=0.2, **ITS, **its)
    loss, terms = ppo.loss(batch, 0.2)
    compare(ppo, loss, theirs, table(batch))
    told = theirs(table(batch))
    for name, other in (("train/clip_fraction", "clip_fraction"), ("train/entropy", "entropy")):
        assert float(terms[name]) == pytest.approx(float(told[other]), rel=1e-4)
    assert 0 < float(terms["train/clip_fraction"]) < 1
    params = ppo.policy.action_parameters(batch.observations)
    log_ratio = ppo.policy.distribution.log_prob(params, batch.actions) - batch.log_prob
    torch.testing.assert_close(terms["train/approx_kl"], (log_ratio.exp() - 1 - log_ratio).mean().detach())


@on_both_spaces
@pytest.mark.parametrize("name", ["a2c", "impala"])
@pytest.mark.parametrize("normalize", [False, True])
def test_plain_objective_equals_torchrl(name: str, described: PolicySpaces, normalize: bool) -> None:
    algorithm = make(name, described, **COEFFICIENTS, normalize_advantages=normalize)
    batch = advantage_batch(algorithm.policy)
    scaled = (batch.advantage - batch.advantage.mean()) / (batch.advantage.std() + 1e-8)
    told = replace(batch, advantage=scaled) if normalize else batch
    compare(algorithm, algorithm.loss(batch)[0], A2CLoss(*networks(algorithm.policy), **ITS), table(told))


def moved(described: PolicySpaces, **fields: Any) -> tuple[Any, Columns, Batch]:
    """APPO after an update, so that policy, target network and who acted are three; columns and the batch of them."""
    appo = make("appo", described, **COEFFICIENTS, learning_rate=1e-2, **fields)
    columns = acted(older(appo.policy), 3)
    appo.update(received(columns), Counters())
    return appo, columns, update_batch(appo, columns)


@on_both_spaces
def test_appos_loss_against_who_acted(described: PolicySpaces) -> None:
    appo, _, batch = moved(described)
    theirs = ClipPPOLoss(*networks(appo.policy), clip_epsilon=0.2, normalize_advantage=True, **ITS)
    compare(appo, appo.loss(batch, 0.2)[0], theirs, table(batch))


@on_both_spaces
def test_appos_loss_against_its_target(described: PolicySpaces) -> None:
    """Ours has the weight in the advantage and the target's log-probability for an anchor; theirs works out both."""
    whole = {"vtrace_lambda": 1.0, "rho_bar": 1e9, "normalize_advantages": False, "clip_against": "target"}
    appo, columns, batch = moved(described, **whole)
    theirs = ClipPPOLoss(*networks(appo.policy), clip_epsilon=0.2, delay_actor=True, **ITS)
    actor, _ = sides.actor_and_critic(appo.target)
    sides.put(theirs.target_actor_network_params, actor.parameters())
    weighted, target = told_of(appo.target, columns, (1e9, 1.0))
    acted = torch.from_numpy(columns["log_prob"]).flatten()
    with torch.no_grad():
        params = appo.target.action_parameters(batch.observations)
        weight = (appo.target.distribution.log_prob(params, batch.actions) - acted).exp()
    assert weight.max() > 1.5, "the weights have something to say"
    plain = Batch(batch.observations, batch.actions, acted, batch.value, weighted / weight, target)
    compare(appo, appo.loss(batch, 0.2)[0], theirs, table(plain))


@on_both_spaces
@pytest.mark.parametrize("name", ["ppo", "a2c", "impala", "appo"])
def test_advantages_and_targets_of_a_fragment(name: str, described: PolicySpaces) -> None:
    """From columns to the batch, each end of an episode included; valued by a copy of the network."""
    by_gae = name in {"ppo", "a2c"}
    own: dict[str, Any] = {"gae_lambda": 0.9} if by_gae else {"vtrace_lambda": 1.0, "rho_bar": 1.1, "c_bar": 0.8}
    algorithm = make(name, described, **own)
    columns = acted(algorithm.policy if by_gae else older(algorithm.policy), 5)
    assert columns["terminated"].any() and columns["truncated"].any()
    advantage, target = told_of(algorithm.policy, columns, None if by_gae else (1.1, 0.8))
    batch = update_batch(algorithm, columns)
    if name == "appo":  # whose clipped ratio is the weight already, as long as it is taken against who acted
        with torch.no_grad():
            params = algorithm.policy.action_parameters(batch.observations)
            now = algorithm.policy.distribution.log_prob(params, batch.actions)
        advantage = advantage / (now - torch.from_numpy(columns["log_prob"]).flatten()).exp().clamp_max(1.1)
    torch.testing.assert_close(batch.advantage, advantage, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch.target, target, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def told_of(policy: ActorCritic, columns: Columns, bars: tuple[float, float] | None) -> tuple[Tensor, Tensor]:
    """Advantages and targets `[T · S]` as TorchRL works them out: by GAE, or weighted by V-trace with ρ̄ and c̄."""
    actor, critic = networks(policy)
    tensors = {key: torch.from_numpy(array) for key, array in columns.items()}
    led_to = torch.cat([tensors["obs"][1:], tensors["bootstrap_obs"][None]])
    led_to[tuple(tensors["final_index"].to(torch.int64).T)] = tensors["final_obs"]
    value, after = critic.module(tensors["obs"]), critic.module(led_to)
    over = {"done": tensors["terminated"] | tensors["truncated"], "terminated": tensors["terminated"]}
    kept = [value, after, tensors["reward"].unsqueeze(-1)]
    ends = {key: item.unsqueeze(-1) for key, item in over.items()}
    lengthwise = [item.transpose(0, 1) for item in kept], {key: item.transpose(0, 1) for key, item in ends.items()}
    if bars is None:
        found = generalized_advantage_estimate(0.99, 0.9, *lengthwise[0], **lengthwise[1])
    else:
        drawn = actor.get_dist(TensorDict({"observation": tensors["obs"]}, []))
        log_pi, log_mu = (item.T.unsqueeze(-1) for item in (drawn.log_prob(tensors["action"]), tensors["log_prob"]))
        found = vtrace_advantage_estimate(
            0.99, log_pi, log_mu, *lengthwise[0], **lengthwise[1], rho_thresh=bars[0], c_thresh=bars[1]
        )
    advantage, target = (item.squeeze(-1).T.flatten() for item in found)
    return advantage, target


class Joint(nn.Module):
    """Values `[B, A, 1]` from what all agents observe `[B, A, …]`: each agent's own first, then the others', then its
    number; in the environment's units, as TorchRL has them."""

    def __init__(self, policy: ActorCritic) -> None:
        super().__init__()
        self.layers = sides.copied(policy.critic.mlp, policy.value_head)
        self.scale = copy.deepcopy(policy.value_scale)

    def forward(self, observation: Tensor) -> Tensor:
        agents, rows = observation.shape[1], []
        for own in range(agents):
            order = [own, *(other for other in range(agents) if other != own)]
            number = torch.eye(agents)[own].expand(len(observation), -1)
            rows.append(torch.cat([*(observation[:, agent] for agent in order), number], dim=1))
        value: Tensor = self.layers(torch.stack(rows, dim=1))
        return value if self.scale is None else self.scale.restored(value)


@on_both_spaces
@pytest.mark.parametrize("normalize_values", [False, True])
@pytest.mark.parametrize("normalize_advantages", [False, True])
def test_mappos_loss(described: PolicySpaces, normalize_values: bool, normalize_advantages: bool) -> None:
    """TorchRL's critic predicts in the environment's units and its loss normalizes; ours predicts normalized values."""
    agents, num_envs, steps = 3, 2, 8
    switches: dict[str, Any] = {"normalize_values": normalize_values, "normalize_advantages": normalize_advantages}
    ppo = make("ppo", described, {"critic_observes": "team"}, agents=agents, **COEFFICIENTS, **switches)
    columns = with_team(acted(older(ppo.policy), 3, steps, agents * num_envs), described.observation, agents)
    batch = update_batch(ppo, columns)
    scale = ppo.policy.value_scale
    rows = table(batch if scale is None else replace(batch, target=scale.restored(batch.target)))
    together = rows.reshape(steps, agents, num_envs).transpose(1, 2).flatten(0, 1).exclude("state_value")
    actor, _ = networks(ppo.policy)
    theirs = MAPPOLoss(
        actor, sides.value_of(Joint(ppo.policy)), clip_epsilon=0.2, normalize_advantage=normalize_advantages,
        normalize_advantage_exclude_dims=(), value_norm=PopArtValueNorm(shape=1) if normalize_values else None, **ITS,
    )  # fmt: skip
    compare(ppo, ppo.loss(batch, 0.2)[0], theirs, together, rel=1e-3)
