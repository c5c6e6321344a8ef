"""Policies with a core: batch and loss against a walk step by step, and what an update promises for them."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rollout_worker.making import describe_space
from shared.algorithm_configs.a2c import A2CConfig
from shared.algorithm_configs.appo import APPOConfig
from shared.algorithm_configs.dqn import DQNConfig
from shared.algorithm_configs.impala import IMPALAConfig
from shared.algorithm_configs.ppo import PPOConfig
from shared.config import Config, PolicyConfig
from shared.errors import ConfigError
from shared.fragment import expected_columns
from shared.policies.recurrent import RecurrentActorCritic
from shared.policies.registry import build_policies
from shared.spaces import Columns, PolicySpaces
from shared.steps import Counters
from tests.conftest import minimal_config
from tests.trainer_node.game import NewGame, balanced, small
from tests.trainer_node.test_ppo import CPU, of, weights
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.ppo import PPO
from trainer_node.algorithms.registry import make_algorithm
from trainer_node.algorithms.sequences import Sequences

STEPS, SLOTS, GAMMA, LAMBDA = 8, 5, 0.9, 0.8
SPACES = PolicySpaces(describe_space(spaces.Box(-5.0, 5.0, (3,))), describe_space(spaces.Discrete(4)))
CORES = pytest.mark.parametrize("core", ["lstm", "gru"])


def network(core: str, **config: Any) -> PolicyConfig:
    return PolicyConfig.model_validate(
        {"core": core, "core_size": 6, "share_encoder": True, "hidden_sizes": (8,), **config}
    )


def make_ppo(core: str = "lstm", policy: dict[str, Any] | None = None, **config: Any) -> PPO:
    """With larger heads than at the start, so that outputs tell states apart."""
    built = build_policies({"p": SPACES}, {"p": network(core, **(policy or {}))}, PPOConfig(), 3)["p"]
    with torch.no_grad():
        cast(RecurrentActorCritic, built).head.weight.mul_(100)
    section = PPOConfig.model_validate(
        {"minibatch_size": 16, "epochs": 3, "gamma": GAMMA, "gae_lambda": LAMBDA, **config}
    )
    return cast(PPO, make_algorithm(built, section, Setting(CPU, 3, STEPS, SLOTS)))


def policy_of(ppo: PPO) -> RecurrentActorCritic:
    return cast(RecurrentActorCritic, ppo.policy)


def random_columns(ppo: PPO, seed: int, slots: int = SLOTS) -> Columns:
    """A fragment in the midst of episodes, as a native environment makes it: the step after an end is masked."""
    policy, random = policy_of(ppo), np.random.default_rng(seed)
    over = random.random((STEPS, slots)) < 0.25
    mask = np.ones((STEPS, slots), np.bool_)
    for step in range(1, STEPS):
        over[step] &= ~over[step - 1]
        mask[step] = ~over[step - 1]
    terminated = over & (random.random((STEPS, slots)) < 0.5)
    last_known = random.random((STEPS, slots)) < 0.5
    index = np.argwhere(over & (~terminated | last_known)).astype(np.int32)
    columns: Columns = {
        "obs": random.normal(size=(STEPS, slots, 3)).astype(np.float32),
        "bootstrap_obs": random.normal(size=(slots, 3)).astype(np.float32),
        "final_obs": random.normal(size=(len(index), 3)).astype(np.float32),
        "final_index": index,
        "reward": random.normal(size=(STEPS, slots)).astype(np.float32) * mask,
        "terminated": terminated,
        "truncated": over & ~terminated,
        "mask": mask,
        "state_in": np.tanh(random.normal(size=(slots, policy.state_size))).astype(np.float32),
    }
    with torch.no_grad():
        resets = torch.from_numpy(over | ~mask)
        params, _, _ = policy.sequence(
            {"obs": torch.from_numpy(columns["obs"])}, torch.from_numpy(columns["state_in"]), resets
        )
        actions = policy.distribution.sample(params.flatten(0, 1), torch.Generator().manual_seed(seed))
        log_prob = policy.distribution.log_prob(params.flatten(0, 1), actions)
    columns["action"] = actions["action"].reshape(STEPS, slots).numpy()
    noise = random.normal(size=(STEPS, slots)).astype(np.float32)
    columns["log_prob"] = log_prob.reshape(STEPS, slots).numpy() + 0.3 * noise
    assert set(columns) == set(expected_columns(SPACES, STEPS, slots, policy.state_size))
    return columns


def batch_of(ppo: PPO, columns: Columns) -> Sequences:
    with torch.no_grad():
        made = ppo._batch({name: torch.from_numpy(array) for name, array in columns.items()})
    assert isinstance(made, Sequences)
    return made


def one_row(columns: Columns, name: str, *where: int) -> dict[str, Tensor]:
    return {"obs": torch.from_numpy(columns[name][where][None])}


def slow_slot(ppo: PPO, columns: Columns, slot: int) -> list[dict[str, Any]]:
    """One slot, forwards through the network and backwards through the rewards, a row at a time."""
    policy, rows = policy_of(ppo), []
    state = torch.from_numpy(columns["state_in"][slot][None])
    finals = {(int(t), int(s)): number for number, (t, s) in enumerate(columns["final_index"])}
    for step in range(STEPS):
        obs = one_row(columns, "obs", step, slot)
        value = float(policy.value(obs, state))
        params, state = policy.step(obs, state)
        row: dict[str, Any] = {"step": step, "value": value, "params": params, "after": state}
        if (step, slot) in finals:
            row["next_value"] = float(policy.value(one_row(columns, "final_obs", finals[step, slot]), state))
        row["over"] = any(columns[name][step, slot] for name in ("terminated", "truncated"))
        if row["over"] or not columns["mask"][step, slot]:
            state = torch.zeros_like(state)
        rows.append(row)
    bootstrap = float(policy.value(one_row(columns, "bootstrap_obs", slot), state))
    running = 0.0
    for step in reversed(range(STEPS)):
        row, terminated = rows[step], columns["terminated"][step, slot]
        follows = bootstrap if step == STEPS - 1 else rows[step + 1]["value"]
        follows = 0.0 if terminated else row.get("next_value", follows)
        row["follows"] = float(follows)
        delta = columns["reward"][step, slot] + GAMMA * follows - row["value"]
        running = row["advantage"] = float(delta) + (0.0 if row["over"] else GAMMA * LAMBDA * running)
        if not columns["mask"][step, slot]:
            running = 0.0
    return [row for row in rows if columns["mask"][row["step"], slot]]


@CORES
def test_advantages_and_targets_are_those_of_a_walk_through_each_slot(core: str) -> None:
    ppo = make_ppo(core)
    columns = random_columns(ppo, 4)
    assert len(columns["final_index"]) > 1 and columns["terminated"].any() and not columns["mask"].all()
    batch = batch_of(ppo, columns)
    with torch.no_grad():
        rows = [row for slot in range(SLOTS) for row in slow_slot(ppo, columns, slot)]
    flat = batch.flat()
    np.testing.assert_allclose(flat.value, [row["value"] for row in rows], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(flat.advantage, [row["advantage"] for row in rows], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(flat.target, flat.advantage + flat.value, rtol=1e-5, atol=1e-6)


def slow_loss(ppo: PPO, columns: Columns, slots: list[int], batch: Sequences, clip: float, bonus: float) -> float:
    """Schulman et al. 2017, eq. 7 and 9, over these slots; values and targets as `batch` has them."""
    advantages, surrogates, squares, entropies, ratios = [], [], [], [], []
    for slot in slots:
        for row in slow_slot(ppo, columns, slot):
            log_p = torch.log_softmax(row["params"][0].double(), dim=0)
            new = log_p[int(columns["action"][row["step"], slot])]
            ratios.append((new - float(columns["log_prob"][row["step"], slot])).exp())
            entropies.append(-(log_p.exp() * log_p).sum())
            advantages.append(float(batch.advantage[slot, row["step"]]))
            squares.append((row["value"] - float(batch.target[slot, row["step"]])) ** 2)
    scaled = (np.array(advantages) - np.mean(advantages)) / (np.std(advantages, ddof=1) + 1e-8)
    for advantage, ratio in zip(scaled, ratios, strict=True):
        bounded = min(max(float(ratio), 1 - clip), 1 + clip)
        surrogates.append(min(advantage * float(ratio), advantage * bounded))
    entropy = float(torch.stack(entropies).mean())
    return float(-np.mean(surrogates) + 0.5 * np.mean(squares) - bonus * entropy)


@CORES
def test_the_loss_of_some_slots_is_the_papers(core: str) -> None:
    ppo = make_ppo(core, entropy_coefficient=0.02)
    columns = random_columns(ppo, 4)
    batch = batch_of(ppo, columns)
    slots = [3, 0, 4]
    loss, terms = ppo.loss(batch.take(torch.tensor(slots)), 0.2)
    with torch.no_grad():
        assert loss.item() == pytest.approx(slow_loss(ppo, columns, slots, batch, 0.2, 0.02), rel=1e-4)
    assert 0 < float(terms["train/clip_fraction"]) < 1


def test_the_gradient_is_that_of_the_slow_loss_through_all_steps() -> None:
    ppo = make_ppo("lstm", entropy_coefficient=0.02)
    columns, slots = random_columns(ppo, 4), [0, 1, 2]
    batch = batch_of(ppo, columns)
    ppo.loss(batch.take(torch.tensor(slots)), 0.2)[0].backward()
    for name, parameter in policy_of(ppo).named_parameters():
        if not parameter.numel():
            continue
        assert parameter.grad is not None
        place = int(parameter.grad.abs().argmax())
        found, weight, losses = parameter.grad.flatten()[place].item(), parameter.data.view(-1), []
        kept = weight[place].item()
        with torch.no_grad():
            for change in (2e-3, -2e-3):
                weight[place] = kept + change
                losses.append(slow_loss(ppo, columns, slots, batch, 0.2, 0.02))
            weight[place] = kept
        assert found == pytest.approx((losses[0] - losses[1]) / 4e-3, rel=0.1, abs=2e-3), name


def test_minibatches_are_whole_slots_and_no_larger_than_they_may_be() -> None:
    ppo = make_ppo(epochs=2, minibatch_size=2 * STEPS + 3)
    columns = random_columns(ppo, 5)
    assert ppo.update(of(columns), Counters())["train/gradient_steps"] == 2 * 3, "5 slots, two at a time"


def test_a_slot_that_nobody_acted_in_is_no_sequence() -> None:
    ppo = make_ppo()
    columns = random_columns(ppo, 6)
    columns["mask"][:, 2] = columns["terminated"][:, 2] = columns["truncated"][:, 2] = False
    kept = columns["final_index"][:, 1] != 2
    columns |= {"final_index": columns["final_index"][kept], "final_obs": columns["final_obs"][kept]}
    assert len(batch_of(ppo, columns)) == SLOTS - 1
    columns["mask"][:] = False
    before = weights(ppo)
    assert ppo.update(of(columns), Counters())["train/gradient_steps"] == 0
    assert weights(ppo) == before


def test_masked_rows_do_not_influence_the_update() -> None:
    results = []
    for garbage in (0, 1):
        ppo = make_ppo(policy={"normalise_observations": True})
        columns = random_columns(ppo, 5)
        absent = ~columns["mask"]
        assert absent.sum() > 3
        random = np.random.default_rng(garbage)
        for name in ("obs", "reward", "log_prob"):
            columns[name][absent] = random.normal(size=columns[name][absent].shape) * 10
        columns["action"][absent] = garbage
        results.append((ppo.update(of(columns), Counters()), weights(ppo)))
    assert results[0] == results[1]


def test_what_was_remembered_before_the_fragment_matters() -> None:
    results = []
    for known in (0.0, 1.0):
        ppo = make_ppo()
        columns = random_columns(ppo, 5)
        columns["state_in"] *= np.float32(known)
        ppo.update(of(columns), Counters())
        results.append(weights(ppo))
    assert results[0] != results[1]


def test_several_fragments_are_one_fragment_with_more_slots() -> None:
    one, other = make_ppo(), make_ppo()
    parts = [random_columns(one, seed, slots) for seed, slots in ((1, 4), (2, 3))]
    whole: Columns = {
        name: np.concatenate([part[name] for part in parts], axis=0 if name in ("state_in", "bootstrap_obs") else 1)
        for name in parts[0]
        if not name.startswith("final_")
    }
    whole["final_obs"] = np.concatenate([part["final_obs"] for part in parts])
    whole["final_index"] = np.concatenate(
        [parts[0]["final_index"], parts[1]["final_index"] + np.array([0, 4], np.int32)]
    )
    assert one.update(of(*parts), Counters()) == other.update(of(whole), Counters())
    assert weights(one) == weights(other)


def test_many_slots_are_valued_in_pieces_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ppo = make_ppo()
    columns = random_columns(ppo, 5)
    whole = batch_of(ppo, columns)
    monkeypatch.setattr("trainer_node.algorithms.outputs.CHUNK", 2 * STEPS)
    pieces = batch_of(ppo, columns)
    torch.testing.assert_close(whole.value, pieces.value)
    torch.testing.assert_close(whole.advantage, pieces.advantage)


def test_a2c_learns_the_same_batch_in_one_step() -> None:
    built = build_policies({"p": SPACES}, {"p": network("gru")}, A2CConfig(), 3)["p"]
    section = A2CConfig(gamma=GAMMA, gae_lambda=LAMBDA)
    a2c = cast(Any, make_algorithm(built, section, Setting(CPU, 3, STEPS, SLOTS)))
    columns = random_columns(a2c, 4)
    batch = batch_of(a2c, columns)
    loss, terms = a2c.loss(batch)
    with torch.no_grad():
        rows = [(slot, row) for slot in range(SLOTS) for row in slow_slot(a2c, columns, slot)]
        log_probs = [
            float(torch.log_softmax(row["params"][0], 0)[int(columns["action"][row["step"], slot])])
            for slot, row in rows
        ]
        expected = -np.mean([row["advantage"] * log_p for (_, row), log_p in zip(rows, log_probs, strict=True)])
    assert float(terms["train/policy_loss"]) == pytest.approx(expected, rel=1e-4)
    assert a2c.update(of(columns), Counters())["train/gradient_steps"] == 1
    assert torch.isfinite(loss)


def make_vtrace(section: IMPALAConfig | APPOConfig) -> Any:
    built = build_policies({"p": SPACES}, {"p": network("gru")}, section, 3)["p"]
    with torch.no_grad():
        cast(RecurrentActorCritic, built).head.weight.mul_(100)
    return make_algorithm(built, section, Setting(CPU, 3, STEPS, SLOTS))


def slow_vtrace(algorithm: Any, columns: Columns) -> list[dict[str, float]]:
    """Espeholt et al. 2018, remark 2, backwards through each slot: what a row's value learns, and its advantage."""
    found = []
    for slot in range(SLOTS):
        correction, rows = 0.0, []
        for row in reversed(slow_slot(algorithm, columns, slot)):
            step = row["step"]
            log_p = torch.log_softmax(row["params"][0], dim=0)[int(columns["action"][step, slot])]
            ratio = float((log_p - float(columns["log_prob"][step, slot])).exp())
            reward = float(columns["reward"][step, slot])
            after = 0.0 if row["over"] else correction
            delta = min(1.0, ratio) * (reward + GAMMA * row["follows"] - row["value"])
            correction = delta + GAMMA * LAMBDA * min(1.0, ratio) * after
            advantage = reward + GAMMA * (row["follows"] + after) - row["value"]
            rows.append({"target": row["value"] + correction, "advantage": advantage, "weight": min(1.0, ratio)})
        found += reversed(rows)
    return found


def test_impala_learns_vtraces_targets_of_whole_sequences() -> None:
    impala = make_vtrace(IMPALAConfig(gamma=GAMMA, vtrace_lambda=LAMBDA))
    columns = random_columns(impala, 4)
    flat = batch_of(impala, columns).flat()
    with torch.no_grad():
        rows = slow_vtrace(impala, columns)
    assert len({row["weight"] for row in rows}) > 5, "some ratios are below 1"
    np.testing.assert_allclose(flat.target, [row["target"] for row in rows], rtol=1e-4, atol=1e-5)
    weighted = [row["weight"] * row["advantage"] for row in rows]
    np.testing.assert_allclose(flat.advantage, weighted, rtol=1e-4, atol=1e-5)
    assert impala.update(of(columns), Counters())["train/gradient_steps"] == 1


@pytest.mark.parametrize("against", ["behaviour", "target"])
def test_appo_learns_sequences_against_either_policy(against: str) -> None:
    config = {"gamma": GAMMA, "vtrace_lambda": LAMBDA, "clip_against": against, "kl_coefficient": 0.1}
    appo = make_vtrace(APPOConfig.model_validate(config | {"minibatch_size": 2 * STEPS, "epochs": 2}))
    columns = random_columns(appo, 4)
    batch = batch_of(appo, columns)
    with torch.no_grad():
        rows = slow_vtrace(appo, columns)
        params = [row["params"][0] for slot in range(SLOTS) for row in slow_slot(appo, columns, slot)]
    weights_of = [row["weight"] if against == "target" else 1.0 for row in rows]
    expected = [weight * row["advantage"] for weight, row in zip(weights_of, rows, strict=True)]
    flat = batch.flat()
    np.testing.assert_allclose(flat.advantage, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(flat.target, [row["target"] for row in rows], rtol=1e-4, atol=1e-5)
    assert flat.anchor_params is not None
    torch.testing.assert_close(flat.anchor_params, torch.stack(params), rtol=1e-4, atol=1e-5)
    _, terms = appo.loss(batch, 0.2)
    assert float(terms["train/kl_from_target"]) == pytest.approx(0, abs=1e-6), "nothing has been learnt yet"
    if against == "target":
        assert float(terms["train/clip_fraction"]) == 0, "the ratio is to the target network, which is the policy"
    else:
        assert float(terms["train/clip_fraction"]) > 0
    metrics = appo.update(of(columns), Counters())
    assert metrics["train/gradient_steps"] == 2 * 3 and metrics["train/kl_from_target"] > 0


def test_what_cannot_be_learnt_is_refused() -> None:
    policies = {"default": {"core": "lstm", "share_encoder": True}}
    with pytest.raises(ConfigError, match=r"minibatch_size=7 is less than rollout\.fragment_steps=8"):
        minimal_config(policies=policies, algorithm={"minibatch_size": 7})
    minimal_config(policies=policies, algorithm={"minibatch_size": 8})
    with pytest.raises(ConfigError, match="algorithm dqn learns single steps"):
        build_policies({"p": SPACES}, {"p": network("gru")}, DQNConfig(), 3)


def recurrent(core: str, **sections: Any) -> Config:
    policy = {"core": core, "core_size": 6, "share_encoder": True, "hidden_sizes": [8], "normalise_observations": True}
    return small(policies={"default": policy | {"normalise_rewards": True}}, **sections)


@pytest.mark.parametrize(("core", "algorithm"), [("lstm", "ppo"), ("gru", "ppo"), ("gru", "impala"), ("lstm", "appo")])
def test_the_whole_run_dies_at_every_version_and_the_weights_are_the_same(
    new_game: NewGame, core: str, algorithm: str
) -> None:
    environment = {"id": "CartPole-v1", "num_envs": 3}
    learning = {"name": algorithm} | ({} if algorithm == "impala" else {"epochs": 2, "minibatch_size": 12})
    config = recurrent(core, stop_at={"updates": 6}, environment=environment, algorithm=learning)
    whole = new_game(config).finish()
    game = new_game(config)
    for version in range(1, 6):
        game.play_to(version)
        if version == 3:  # in the middle of a fragment
            assert game.worker._claim(0).granted
            game.worker._sampler.sample(game.worker._policies, game.worker._exploration(), 5)
        game.lose()
    assert game.finish() == whole
    assert game.worker._sampler.life.incarnation == 0, "its episodes were taken up each time"
    balanced(game)
