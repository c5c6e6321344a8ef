"""DQN: the loss of each head against a slow NumPy computation, what it bootstraps from, and how often it learns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rollout_worker.making import describe_space
from shared.algorithm_configs.dqn import DQNConfig, QLearningConfig, RainbowConfig
from shared.config import PolicyConfig
from shared.errors import ConfigError
from shared.policies.codec import state_arrays
from shared.policies.q_network import QNetwork
from shared.policies.registry import build_policies
from shared.spaces import Array, PolicySpaces
from shared.steps import Counters
from tests.conftest import minimal_config
from tests.trainer_node.continuous import minibatch, moved_apart
from tests.trainer_node.memories.streams import PLAIN, Stream
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.dqn import DQN
from trainer_node.algorithms.experience import Experience
from trainer_node.algorithms.off_policy import Minibatch
from trainer_node.algorithms.registry import make_algorithm
from trainer_node.reward_scaling import RewardFilter, RewardScaling

SPACES = PolicySpaces(describe_space(spaces.Box(-5.0, 5.0, (2,))), describe_space(spaces.Discrete(3)))
HEADS: list[dict[str, Any]] = [
    {"head": "expected"},
    {"head": "expected", "loss": "squared"},
    {"head": "c51", "atoms": 7, "v_min": -3.0, "v_max": 3.0},
    {"head": "qr", "quantiles": 5},
]
STEPS, SLOTS = 4, 3


def make_dqn(
    section: type[QLearningConfig] = DQNConfig,
    policy: dict[str, Any] | None = None,
    rewards: RewardFilter | None = None,
    capacity: int = 240,
    **fields: Any,
) -> DQN:
    memory = fields.pop("memory", {"kind": "uniform"}) | {"capacity": capacity}
    fields = {"minibatch_size": 8, "gradient_steps_per_env_step": 1.0, "memory": memory} | fields
    config = section.model_validate(fields)
    networks = {"p": PolicyConfig.model_validate({"hidden_sizes": (6,), **(policy or {})})}
    built = build_policies({"p": SPACES}, networks, config, seed=3)["p"]
    made = make_algorithm(built, config, Setting(torch.device("cpu"), 3, STEPS, SLOTS, rewards))
    assert isinstance(made, DQN)
    return made


def fragments(count: int, seed: int = 0, **ends: float) -> list[Experience]:
    stream = Stream(seed, PLAIN, STEPS, SLOTS)
    for name, value in ends.items():
        setattr(stream, name, value)
    return [Experience(made.source, made.columns) for made in stream.fragments(count)]


def softmax(logits: Array) -> Array:
    powers = np.exp(logits - logits.max())
    shares: Array = powers / powers.sum()
    return shares


def slow_loss(
    fields: dict[str, Any], online: Array, after: Array, target: Array, batch: Minibatch, double: bool
) -> float:
    """Outputs `[B, A, width]` of the online network now and after, and of the target network after."""

    def mean(output: Array) -> float:
        if fields["head"] == "c51":
            return float(sum(softmax(output) * np.linspace(fields["v_min"], fields["v_max"], fields["atoms"])))
        return float(sum(output) / len(output))

    total = 0.0
    for row in range(len(batch)):
        reward, discount = float(batch.reward[row]), float(batch.discount[row])
        predicted = online[row, int(batch.actions["action"][row])].astype(np.float64)
        judged = after if double else target
        best = max(range(3), key=lambda action: mean(judged[row, action].astype(np.float64)))
        bootstrap = target[row, best].astype(np.float64)
        loss = 0.0
        if fields["head"] == "c51":
            atoms = np.linspace(fields["v_min"], fields["v_max"], fields["atoms"])
            wanted = np.zeros(len(atoms))
            for share, atom in zip(softmax(bootstrap), atoms):
                moved = min(max(reward + discount * atom, atoms[0]), atoms[-1])
                for i, place in enumerate(atoms):
                    wanted[i] += share * max(0.0, 1 - abs(moved - place) / (atoms[1] - atoms[0]))
            loss = -float(sum(wanted * np.log(softmax(predicted))))
        elif fields["head"] == "qr":
            for i, quantile in enumerate(predicted):
                for other in bootstrap:
                    u = reward + discount * other - quantile
                    huber = u * u / 2 if abs(u) <= 1 else abs(u) - 0.5
                    loss += abs((i + 0.5) / len(predicted) - (u < 0)) * huber / len(bootstrap)
        else:
            u = reward + discount * bootstrap[0] - predicted[0]
            huber = u * u / 2 if abs(u) <= 1 else abs(u) - 0.5
            loss = u * u if fields.get("loss") == "squared" else huber
        total += float(batch.weight[row]) * loss / len(batch)
    return total


@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("fields", HEADS, ids=str)
def test_the_loss_is_the_papers(fields: dict[str, Any], double: bool, dueling: bool) -> None:
    dqn = make_dqn(double=double, dueling=dueling, **fields)
    moved_apart(dqn.policy, dqn.target)
    batch = minibatch(SPACES, 40)
    with torch.no_grad():
        now, after = dqn.policy.outputs(batch.observations), dqn.policy.outputs(batch.next_observations)
        outputs = now.numpy(), after.numpy(), dqn.target.outputs(batch.next_observations).numpy()
    found, lesson = dqn.loss(batch)
    assert float(found.detach()) == pytest.approx(slow_loss(fields, *outputs, batch, double), rel=1e-4)
    assert float(lesson.metrics["train/loss"]) == float(found.detach())
    other = slow_loss(fields, *outputs, batch, not double)
    assert float(found.detach()) != pytest.approx(other, rel=1e-3), "the two networks never disagree: nothing is shown"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("fields", [*HEADS, {"head": "expected", "dueling": True, "prior_scale": 2.0}], ids=str)
def test_the_loss_of_an_ensemble_is_the_mean_of_its_heads_each_on_its_own_data(
    fields: dict[str, Any], double: bool, masked: bool
) -> None:
    """Every head bootstraps from itself, as if it were alone; transitions that it is not taught have no weight."""
    heads, rows = 4, 40
    dqn = make_dqn(double=double, heads=heads, **fields)
    moved_apart(dqn.policy, dqn.target)
    batch = minibatch(SPACES, rows)
    taught = torch.from_numpy(np.random.default_rng(5).integers(0, 2, (heads, rows)).astype(np.float32))
    batch = replace(batch, heads=taught if masked else None)

    def of_each(network: QNetwork, sight: dict[str, torch.Tensor]) -> Array:
        with torch.no_grad():
            return network.outputs(sight).numpy().reshape(heads, rows, 3, -1)

    now, after = of_each(dqn.policy, batch.observations), of_each(dqn.policy, batch.next_observations)
    target = of_each(dqn.target, batch.next_observations)
    expected, wrong = 0.0, np.zeros((heads, rows))
    for head in range(heads):
        alone = replace(batch, weight=batch.weight * taught[head]) if masked else batch
        expected += slow_loss(fields, now[head], after[head], target[head], alone, double) / heads
    found, lesson = dqn.loss(batch)
    assert float(found.detach()) == pytest.approx(expected, rel=1e-4)
    values = of_means(fields, now)[:, np.arange(rows), batch.actions["action"].numpy()]
    assert float(lesson.metrics["train/disagreement"]) == pytest.approx(values.std(axis=0).mean(), rel=1e-4)
    if fields["head"] != "c51":
        judged = of_means(fields, after if double else target).argmax(axis=2)
        best = np.take_along_axis(of_means(fields, target), judged[..., np.newaxis], axis=2)[..., 0]
        wrong = np.abs(batch.reward.numpy() + batch.discount.numpy() * best - values)
        share = taught.numpy() if masked else np.ones((heads, rows))
        mean = (wrong * share).sum(axis=0) / np.maximum(share.sum(axis=0), 1)
        np.testing.assert_allclose(lesson.td_error.numpy(), mean, rtol=1e-4, atol=1e-5)


def of_means(fields: dict[str, Any], outputs: Array) -> Array:
    """`[…, width]` → `[…]`."""
    if fields["head"] != "c51":
        return np.asarray(outputs.astype(np.float64).mean(axis=-1))
    powers = np.exp(outputs.astype(np.float64))
    atoms = np.linspace(fields["v_min"], fields["v_max"], fields["atoms"])
    return np.asarray((powers / powers.sum(axis=-1, keepdims=True)) @ atoms)


def test_each_head_learns_from_its_share_of_the_transitions_and_always_from_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dqn = make_dqn(heads=3, bootstrap_share=0.5, capacity=3 * STEPS * SLOTS)
    seen: dict[int, set[tuple[float, ...]]] = {}
    learn = dqn.learn

    def noted(batch: Minibatch, *rest: Any) -> Any:
        assert batch.heads is not None and batch.heads.shape == (3, len(batch))
        for number, taught in zip(batch.observations["obs"][:, 0].tolist(), batch.heads.T.tolist(), strict=True):
            seen.setdefault(int(number), set()).add(tuple(taught))
        return learn(batch, *rest)

    monkeypatch.setattr(dqn, "learn", noted)
    for update, item in enumerate(fragments(9)):
        dqn.update([item], Counters(env_steps=STEPS * SLOTS * (update + 1), updates=update))
    assert len(seen) > 60 and all(len(masks) == 1 for masks in seen.values())
    share = np.array([next(iter(masks)) for masks in seen.values()]).mean(axis=0)
    assert (np.abs(share - 0.5) < 0.2).all()
    everything = make_dqn(heads=3, bootstrap_share=1.0)
    everything.observe(fragments(2))
    drawn = everything.memory.sample(4, np.random.default_rng(0), gamma=0.9)
    assert everything._on_device(drawn).heads is None


def test_a_head_does_not_learn_from_what_is_not_its_own_and_priors_never_learn() -> None:
    dqn = make_dqn(heads=3, prior_scale=2.0, learning_rate=0.1)
    batch = replace(minibatch(SPACES), heads=torch.tensor([[1.0], [0.0], [1.0]]).expand(3, 9))
    before = {name: array.copy() for name, array in state_arrays(dqn.policy).items()}
    dqn.learn(batch, Counters(), torch.Generator())
    after = state_arrays(dqn.policy)
    assert all(np.array_equal(after[name], array) for name, array in before.items() if "prior" in name)
    moved = [
        not np.array_equal(after["advantage.layers.1.weight"][head], before["advantage.layers.1.weight"][head])
        for head in range(3)
    ]
    assert moved == [True, False, True]
    assert any("prior" in name for name in before)


@pytest.mark.parametrize("fields", HEADS, ids=str)
def test_gradients_are_those_of_finite_differences(fields: dict[str, Any]) -> None:
    dqn = make_dqn(dueling=True, noisy=True, double=False, **fields)
    moved_apart(dqn.policy, dqn.target)
    batch = minibatch(SPACES)
    noise = dqn.policy.draw_noise(torch.Generator().manual_seed(2))
    parameters = list(dqn.policy.parameters())
    gradients = torch.autograd.grad(dqn.loss(batch, (noise, noise, noise))[0], parameters)
    # The encoder makes float32 of observations, and float32 is too coarse to differ: along the gradient it is not.
    length = float(torch.cat([gradient.flatten() for gradient in gradients]).norm())
    sides = []
    with torch.no_grad():
        for shift in (5e-3, -1e-2):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.add_(gradient, alpha=shift / length)
            sides.append(float(dqn.loss(batch, (noise, noise, noise))[0]))
    assert (sides[0] - sides[1]) / 1e-2 == pytest.approx(length, rel=0.02)


def test_what_is_bootstrapped_from_has_no_gradient() -> None:
    dqn = make_dqn()
    moved_apart(dqn.policy, dqn.target)
    loss, _ = dqn.loss(minibatch(SPACES))
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is None for parameter in dqn.target.parameters())
    assert all(parameter.grad is not None for parameter in dqn.policy.parameters())


@pytest.mark.parametrize(("terminated", "expected"), [(True, [2.0]), (False, [2.0 + 0.5 * 8.0])])
def test_truncation_bootstraps_from_the_true_last_observation_and_termination_does_not(
    terminated: bool, expected: list[float]
) -> None:
    dqn = make_dqn(gamma=0.5, double=False, policy={"hidden_sizes": ()}, minibatch_size=6)
    with torch.no_grad():  # the value of every action is the sum of the observation's elements
        dqn.target.advantage.layers[0].get_parameter("weight").fill_(1.0)
        dqn.target.advantage.layers[0].get_parameter("bias").zero_()
    (item,) = fragments(1, ends=0.0, absent=0.0)
    columns = dict(item.columns)
    columns["reward"] = np.full((STEPS, SLOTS), 2.0, np.float32)
    columns["terminated"] = np.full((STEPS, SLOTS), terminated)
    columns["truncated"] = ~columns["terminated"]
    index = np.argwhere(columns["truncated"]).astype(np.int32)
    columns["final_index"], columns["final_obs"] = index, np.full((len(index), 2), 4.0, np.float32)
    dqn.observe([Experience(item.source, columns)])
    batch = dqn._on_device(dqn.memory.sample(6, np.random.default_rng(0), gamma=0.5))
    target = batch.reward + batch.discount * dqn.bootstrap(batch, None, None)[:, 0]
    assert target.tolist() == pytest.approx(expected * 6)


def test_gradient_steps_are_those_that_the_env_steps_ask_for_and_heat_up_asks_for_none() -> None:
    dqn = make_dqn(gradient_steps_per_env_step=0.3)
    dqn.observe(fragments(2))
    assert dqn.done == 0 and len(dqn.memory) > 0
    counts = []
    for update, item in enumerate(fragments(6, seed=1)):
        counters = Counters(env_steps=STEPS * SLOTS * (update + 1), updates=update)
        counts.append(int(dqn.update([item], counters)["train/gradient_steps"]))
    assert counts == [3, 4, 3, 4, 4, 3] and dqn.done == int(0.3 * 72)


def test_where_nobody_has_acted_yet_what_is_due_is_made_up_for() -> None:
    dqn = make_dqn()
    absent, present = fragments(1, absent=1.1)[0], fragments(1)[0]
    metrics = dqn.update([absent], Counters(env_steps=5))
    assert metrics["train/gradient_steps"] == 0 and metrics["train/memory_transitions"] == 0
    assert "train/loss" not in metrics
    assert dqn.update([present], Counters(env_steps=9, updates=1))["train/gradient_steps"] == 9


def test_the_target_network_follows_every_so_many_gradient_steps() -> None:
    dqn = make_dqn(target_update_steps=4, tau=0.25, learning_rate=0.01)
    before = dict(state_arrays(dqn.target))
    (item,) = fragments(1)
    dqn.update([item], Counters(env_steps=3))
    assert all(np.array_equal(before[name], array) for name, array in state_arrays(dqn.target).items())
    dqn.update([item], Counters(env_steps=4, updates=1))
    online, target = state_arrays(dqn.policy), state_arrays(dqn.target)
    for name, array in target.items():
        np.testing.assert_allclose(array, 0.75 * before[name] + 0.25 * online[name], rtol=1e-5, atol=1e-6)
    assert any(not np.allclose(array, before[name]) for name, array in target.items())


def test_priorities_are_the_errors_and_weights_count(monkeypatch: pytest.MonkeyPatch) -> None:
    dqn = make_dqn(RainbowConfig, memory={"kind": "prioritised", "alpha": 1.0, "beta": 1.0}, noisy=False,
                   exploration={"kind": "epsilon_greedy"}, head="expected")  # fmt: skip
    dqn.observe(fragments(3))
    drawn = dqn.memory.sample(8, np.random.default_rng(1), gamma=0.99)
    seen: list[tuple[Array, Array]] = []
    with monkeypatch.context() as patch:
        patch.setattr(dqn.memory, "update_priorities", lambda rows, errors: seen.append((rows, errors)))
        dqn.update(fragments(1, seed=9), Counters(env_steps=2))
    assert len(seen) == 2 and all(rows.shape == errors.shape == (8,) for rows, errors in seen)
    one = dqn._on_device(drawn)
    loss, lesson = dqn.loss(one)
    doubled, _ = dqn.loss(Minibatch(**vars(one) | {"weight": one.weight * 2}))
    assert float(doubled.detach()) == pytest.approx(2 * float(loss.detach()))
    with torch.no_grad():
        value = dqn.policy.outputs(one.observations)[torch.arange(8), one.actions["action"], 0]
        aim = one.reward + one.discount * dqn.bootstrap(one, None, None)[:, 0]
    torch.testing.assert_close(lesson.td_error, aim - value)


def test_rewards_are_normalised_when_they_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = RewardScaling(0.99)
    dqn = make_dqn(rewards=rewards)
    item = fragments(1)[0]
    dqn.observe([item])
    rewards.take_in("w:0", item.columns)
    seen: list[Array] = []
    learn = dqn.learn

    def noted(batch: Minibatch, *rest: Any) -> Any:
        seen.append(batch.reward.numpy())
        return learn(batch, *rest)

    monkeypatch.setattr(dqn, "learn", noted)
    dqn.update([], Counters(env_steps=5))
    there = item.columns["reward"][item.columns["mask"]]
    assert len(seen) == 5 and all(np.isin(found, rewards.scaled(there)).all() for found in seen)
    assert not np.isin(seen[0], there).any()


@pytest.mark.parametrize(
    ("section", "fields"), [(DQNConfig, {}), (RainbowConfig, {}), (DQNConfig, {"heads": 3, "prior_scale": 1.0})]
)
def test_a_copy_with_its_state_learns_on_with_the_same_bits(
    section: type[QLearningConfig], fields: dict[str, Any]
) -> None:
    made: dict[str, Any] = {"policy": {"normalise_observations": True}, "target_update_steps": 3} | fields
    one, two = (make_dqn(section, **made) for _ in range(2))
    stream = fragments(30, seed=2)
    for update in range(25):
        one.update([stream[update]], Counters(env_steps=4 * (update + 1), updates=update))
    two.policy.load_state_dict(one.policy.state_dict())
    two.load_state(one.state())
    with pytest.raises(RuntimeError, match="have not been put back"):
        two.memory.sample(1, np.random.default_rng(0), gamma=0.9)
    for item in stream[25 - one.memory_fragments : 25]:
        two.remember([item])
    for update in range(25, 30):
        found = [
            dqn.update([stream[update]], Counters(env_steps=4 * (update + 1), updates=update)) for dqn in (one, two)
        ]
        assert found[0] == found[1]
    states = [dqn.state() | state_arrays(dqn.policy) for dqn in (one, two)]
    assert states[0].keys() == states[1].keys()
    assert all(np.array_equal(states[0][name], states[1][name]) for name in states[0])


def test_another_networks_state_is_refused() -> None:
    with pytest.raises(ValueError, match=r"target/advantage\.layers\.1\.weight has the shape"):
        make_dqn().load_state(make_dqn(head="qr", quantiles=3).state())


FEW: dict[str, Any] = {"fragment_steps": 8, "fragments_per_update": 2}


@pytest.mark.parametrize(
    ("fields", "sections", "words"),
    [
        (
            {"memory": {"kind": "uniform", "capacity": 60}, "minibatch_size": 9},
            {},
            ["capacity=60", "64 transitions", "num_envs=4"],
        ),
        (
            {"memory": {"kind": "uniform", "capacity": 64}, "minibatch_size": 65},
            {},
            ["minibatch_size=65", "capacity=64"],
        ),
        ({}, {"trainer": {"ranks": 2}}, ["trainer.ranks=2", "dqn learns in one process"]),
        (
            {"memory": {"kind": "hindsight"}},
            {"policies": {"default": {"reward_scale": 0.1}}},
            ["memory.kind=hindsight", "policies.default", "reward_scale"],
        ),
        ({"exploration": {"kind": "sampling"}}, {}, ["exploration.kind=sampling", "noisy=true"]),
        ({"exploration": {"kind": "gaussian"}}, {}, ["exploration.kind=gaussian", "discrete", "epsilon_greedy"]),
        ({"head": "c51", "v_min": 3, "v_max": 3}, {}, ["v_min=3.0", "v_max=3.0"]),
        ({"exploration": {"kind": "ou"}}, {}, ["exploration.kind=ou", "continuous", "boltzmann"]),
        ({"exploration": {"kind": "ucb"}}, {}, ["exploration.kind=ucb", "algorithm.heads=1", "heads to 10"]),
        ({"exploration": {"kind": "bootstrapped"}}, {}, ["exploration.kind=bootstrapped", "algorithm.heads=1"]),
        ({"heads": 5, "noisy": True}, {}, ["heads=5", "noisy=true"]),
        ({"prior_scale": 3}, {}, ["prior_scale=3", "heads=1"]),
        ({"prior_scale": 3, "heads": 5, "head": "c51"}, {}, ["prior_scale=3", "head=c51"]),
        ({"head": "iqn"}, {}, ["algorithm.head", "'qr'"]),
        ({"epochs": 3}, {}, ["algorithm.epochs"]),
    ],
)  # fmt: skip
def test_what_cannot_learn_is_refused(fields: dict[str, Any], sections: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        minimal_config(algorithm={"name": "dqn", **fields}, rollout=FEW, **sections)
    text = str(caught.value)
    assert "\n" not in text and all(word in text for word in words), text
