"""The Q network: its heads and streams against their definitions, noise from generators only, and its file."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from stagecoach.shared.base.errors import UnsupportedSpace
from stagecoach.shared.policies.q_network import NoisyLinear, QNetwork
from stagecoach.shared.policies.serialization import state_arrays
from tests.support.experience.policies import Q_NETWORKS, SIGHT, built_policy, generator

every_kind = pytest.mark.parametrize("fields", Q_NETWORKS, ids=str)


def network(action: spaces.Space[Any] | None = None, hidden: tuple[int, ...] = (8, 6), **fields: Any) -> QNetwork:
    made = built_policy(SIGHT, action or spaces.Discrete(4, start=2), "dqn", fields=fields, hidden_sizes=hidden)
    assert isinstance(made, QNetwork)
    return made


def observations() -> dict[str, torch.Tensor]:
    return {"obs": torch.randn(7, 3, generator=generator(1))}


@every_kind
@pytest.mark.parametrize("hidden", [(), (6,), (8, 6)])
@torch.no_grad()
def test_q_values_are_means_of_the_head(fields: dict[str, Any], hidden: tuple[int, ...]) -> None:
    policy = network(hidden=hidden, **fields)
    outputs, values = policy.outputs(observations()).numpy(), policy.action_parameters(observations()).numpy()
    heads = fields.get("heads", 1)
    assert values.shape == (7, 4) and outputs.shape[:2] == (7 * heads, 4)
    of_heads = policy.head_values(observations())
    assert of_heads.shape == (heads, 7, 4)
    for row in range(7):
        for action in range(4):
            means = []
            for head in range(heads):
                out = outputs[head * 7 + row, action].astype(np.float64)
                if fields.get("head") == "c51":
                    share = np.exp(out) / np.exp(out).sum()
                    mean = sum(p * z for p, z in zip(share, np.linspace(fields["v_min"], fields["v_max"], len(out))))
                else:
                    mean = out.sum() / len(out)
                assert float(of_heads[head, row, action]) == pytest.approx(mean, abs=1e-5)
                means.append(mean)
            assert values[row, action] == pytest.approx(sum(means) / heads, abs=1e-5)


@torch.no_grad()
def test_dueling_streams_are_value_and_advantage() -> None:
    policy = network(dueling=True, head="qr", quantiles=3)
    assert policy.value is not None
    before = policy.outputs(observations())
    policy.value.layers[-1].get_parameter("bias").add_(1.5)
    torch.testing.assert_close(policy.outputs(observations()), before + 1.5)
    policy.advantage.layers[-1].get_parameter("bias").add_(7.0)
    torch.testing.assert_close(policy.outputs(observations()), before + 1.5)
    features = policy.encoder(observations(), None)
    torch.testing.assert_close(policy.outputs(observations()).mean(dim=1), policy.value(features, None))


@pytest.mark.parametrize("hidden", [(), (6,), (8, 6)])
@pytest.mark.parametrize("dueling", [False, True])
@torch.no_grad()
def test_ensemble_heads_are_separate_on_one_encoder(hidden: tuple[int, ...], dueling: bool) -> None:
    """Each is what a network alone would be that had its weights; and a prior is one more of them that is added."""
    ensemble = network(hidden=hidden, dueling=dueling, heads=3, prior_scale=2.0)
    plain = network(hidden=hidden, dueling=dueling)
    priors = ensemble.prior(ensemble.prior_encoder(observations(), None), None)
    arrays = state_arrays(ensemble)
    found = ensemble.head_values(observations())
    for head in range(3):
        for name, tensor in plain.named_parameters():
            array = torch.from_numpy(arrays[name])
            if not name.startswith("encoder"):
                array = array[head].reshape(-1) if name.endswith("bias") else array[head].T
            tensor.copy_(array)
        alone = plain.action_parameters(observations())
        torch.testing.assert_close(found[head], alone + 2.0 * priors[head])
    assert not torch.allclose(found[0], found[1]) and not torch.allclose(priors[0], priors[1])
    assert {name for name, tensor in ensemble.named_parameters() if not tensor.requires_grad} == {
        name for name in arrays if name.startswith("prior")
    }


@torch.no_grad()
def test_best_choice_takes_largest_value() -> None:
    policy = network()
    params = torch.tensor([[1.0, 3.0, 2.0, 3.0], [-1.0, -5.0, -2.0, -0.5]])
    for actions in (policy.distribution.mode(params), policy.distribution.sample(params, generator())):
        assert actions["action"].tolist() == [1, 3]
    log_prob = policy.distribution.log_prob(params, {"action": torch.tensor([1, 0])})
    assert log_prob[0] == 0 and torch.isfinite(log_prob).all() and log_prob[1] < -80


@pytest.mark.parametrize(
    "action", [spaces.Box(-1.0, 1.0, (2,)), spaces.MultiDiscrete([2, 3]), spaces.Tuple((spaces.Discrete(2),) * 2)]
)
def test_q_network_rejects_other_actions(action: spaces.Space[Any]) -> None:
    with pytest.raises(UnsupportedSpace, match="needs one Discrete action, found") as caught:
        network(action)
    assert "\n" not in str(caught.value)


@torch.no_grad()
def test_noisy_layer_matches_paper() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layer = NoisyLinear(4, 3, 0.5)
    assert torch.equal(layer.weight_sigma, torch.full((3, 4), 0.25)) and layer.weight.abs().max() <= 0.5
    drawn = torch.randn(7, generator=generator(5)).numpy().astype(np.float64)
    shaped = [np.sign(e) * np.sqrt(abs(e)) for e in drawn]
    values = np.array([0.3, -1.0, 2.0, 0.7])
    expected = []
    for out in range(3):
        noise_out = shaped[4 + out]
        total = float(layer.bias[out]) + float(layer.bias_sigma[out]) * noise_out
        for into in range(4):
            weight = float(layer.weight[out, into]) + float(layer.weight_sigma[out, into]) * noise_out * shaped[into]
            total += weight * values[into]
        expected.append(total)
    found = layer(torch.tensor(values, dtype=torch.float32)[None], layer.draw(generator(5)))
    torch.testing.assert_close(found[0], torch.tensor(expected, dtype=torch.float32))


@torch.no_grad()
def test_noise_follows_generator_and_is_off_in_evaluation() -> None:
    policy = network(noisy=True, dueling=True, head="c51", atoms=5)
    state = torch.random.get_rng_state()
    first = policy.exploring_parameters(observations(), generator(1))
    assert torch.equal(first, policy.exploring_parameters(observations(), generator(1)))
    assert not torch.equal(first, policy.exploring_parameters(observations(), generator(2)))
    assert torch.equal(state, torch.random.get_rng_state())
    means = policy.action_parameters(observations())
    assert torch.equal(means, policy.action_parameters(observations())) and not torch.equal(means, first)
    for name, tensor in policy.named_parameters():
        if name.endswith("_sigma"):
            tensor.zero_()
    torch.testing.assert_close(policy.exploring_parameters(observations(), generator(3)), means)
    plain, drawing = network(), generator(4)
    assert torch.equal(plain.exploring_parameters(observations(), drawing), plain.action_parameters(observations()))
    assert torch.equal(drawing.get_state(), generator(4).get_state()), "without noisy layers nothing is drawn"
