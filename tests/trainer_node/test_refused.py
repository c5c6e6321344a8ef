"""What cannot learn is refused with both values and what to do: a row for each rule about algorithms."""

from __future__ import annotations

from typing import Any

import pytest

from stagecoach.shared.base.errors import ConfigError
from tests.conftest import minimal_config
from tests.support.learning.algorithms import ON_POLICY
from tests.support.learning.cases import team

RECORDED: dict[str, Any] = {"path": "d.csv"}
SHOWN = {"demonstrations": RECORDED}
CORE = {"policies": {"default": {"core": "lstm", "share_encoder": True}}}
CLONING = {"behavioral_cloning": {"strength": 0.5, "minibatch_size": 24}, "minibatch_size": 16}
WHOLE = {"complete_episodes": True}
CART = {"id": "CartPole-v1", "num_envs": 4, "max_episode_steps": 40}
FALLING = {"kind": "linear", "start": 0.5, "end": -0.1, "over": "4 updates"}
ROWS: list[tuple[dict[str, Any] | str, dict[str, Any], str]] = [
    ("a2c", {"rollout": {"max_policy_lag": 1}}, r"max_policy_lag=1 with algorithm.name=a2c: .* use impala or appo"),
    ({"minibatch_size": 7}, CORE, r"minibatch_size=7 is less than rollout\.fragment_steps=8"),
    ({}, CORE | {"trainer": {"compile": True}}, r"core=lstm with trainer\.compile=true: .*core=none"),
    (CLONING, CORE | SHOWN, r"policies.default.core=lstm with algorithm.behavioral_cloning"),
    (CLONING, {}, r"algorithm.behavioral_cloning needs recorded experience; set demonstrations.path"),
    ({"reward_signals": {"gail": {}}}, {}, r"reward_signals.gail needs recorded experience.*demonstrations.path"),
    ({}, SHOWN, r"demonstrations.path=d.csv with algorithm.name=ppo.*does not use them"),
    (CLONING | {"behavioral_cloning": {"strength": FALLING}}, SHOWN, r"strength.* expected 0 or more, found -0.1"),
    ({"reward_signals": {}}, {}, r"algorithm.reward_signals: extrinsic needs no section; add one of rnd"),
    ({"reward_signals": {"extrinsic": {"strength": 2}}}, {}, "extrinsic needs no section"),
    ({}, {"policies": {"default": {"reward_ewma": 0.1, "normalize_rewards": True}}},
     "reward_ewma=0.1 with normalize_rewards=true.*use one"),
    ({"name": "dqn", "replay_buffer": {"kind": "uniform", "capacity": 60}, "minibatch_size": 9}, {},
     "capacity=60.*64 transitions.*num_envs=4"),
    ({"name": "cql", "replay_buffer": {"kind": "uniform", "capacity": 100}}, {},
     "minibatch_size=256 is more than.*capacity=100"),
    ({"name": "dqn", "minibatch_size": 4}, {"trainer": {"ranks": 5}},
     "trainer.ranks=5 is more than the 4 transitions of each minibatch .algorithm.minibatch_size=4.; lower"),
    ({"name": "dqn", "replay_buffer": {"kind": "hindsight"}}, {"policies": {"default": {"reward_scale": 0.1}}},
     "replay_buffer.kind=hindsight.*policies.default.*reward_scale"),
    ({"name": "dqn", "exploration": {"kind": "sampling"}}, {}, "exploration.kind=sampling.*noisy=true"),
    ({"name": "dqn", "exploration": {"kind": "gaussian"}}, {}, "exploration.kind=gaussian.*discrete.*epsilon_greedy"),
    ({"name": "dqn", "exploration": {"kind": "ucb"}}, {}, "exploration.kind=ucb.*algorithm.heads=1.*heads to 10"),
    ({"name": "dqn", "exploration": {"kind": "bootstrapped"}}, {}, "exploration.kind=bootstrapped.*algorithm.heads=1"),
    ({"name": "dqn", "head": "c51", "v_min": 3, "v_max": 3}, {}, "v_min=3.0.*v_max=3.0"),
    ({"name": "dqn", "heads": 5, "noisy": True}, {}, "heads=5.*noisy=true"),
    ({"name": "dqn", "prior_scale": 3}, {}, "prior_scale=3.*heads=1"),
    ({"name": "dqn", "prior_scale": 3, "heads": 5, "head": "c51"}, {}, "prior_scale=3.*head=c51"),
    ({"name": "r2d2", "noisy": True}, {}, "noisy=True with r2d2.*noisy=False only"),
    ({"name": "r2d2", "replay_buffer": {"kind": "hindsight"}}, {}, "hindsight with r2d2.*prioritized or uniform"),
    ({"name": "r2d2", "exploration": {"kind": "parameter_noise", "sigma": 1}}, {}, "epsilon_greedy or boltzmann only"),
    ("r2d2", {"policies": {"default": {"core": "none"}}}, "policies.default.core=none.*r2d2.*set core=lstm or gru"),
    ({"name": "r2d2", "minibatch_size": 7}, {}, "minibatch_size=7 is less than rollout.fragment_steps=8"),
    ({"name": "rainbow", "reward_signals": {"rnd": {}}}, {}, "n_step=3 with algorithm.reward_signals.*set n_step=1"),
    ("bc", {}, "bc needs recorded experience"),
    ("ppo", {"policies": {"default": {"critic_observes": "team"}}}, "environment.api=gymnasium"),
    ("dqn", team(critic_observes="state"), "critic_observes=state .*algorithm.name=dqn"),
    ("ppo", team(critic_observes="team", share_encoder=True), "share_encoder=true and core=none"),
    ("ppo", team(critic_observes="team", share_encoder=True, core="gru"), "core=gru"),
    ({"name": "vdn", "n_step": 3}, {}, "n_step=3 with vdn"),
    ({"name": "qmix", "noisy": True}, {}, "noisy=True with qmix"),
    ({"name": "qmix", "replay_buffer": {"kind": "prioritized"}}, {}, "replay_buffer.kind=prioritized"),
    ({}, {"rollout": WHOLE, "environment": {"id": "CartPole-v1"}}, "it needs environment.max_episode_steps"),
    ({}, {"rollout": WHOLE, "environment": CART | {"vectorization": "native"}},
     "with environment.vectorization=native"),
    ({}, {"rollout": WHOLE, "environment": CART | {"api": "pettingzoo"}}, "with environment.api=pettingzoo"),
    ("dqn", {"rollout": WHOLE, "environment": CART, "dataset": {"path": "somewhere"}}, "recorded experience"),
    ("dqn", {"dataset": RECORDED | {"only_heatup": True}}, "only_heatup=true with heatup='0 env_steps'"),
    ("bc", {"dataset": RECORDED | {"only_heatup": True}, "heatup": "96 env_steps"}, "and dataset.only_heatup=false"),
    *((name, {"environment": {"id": environment, "num_envs": 4}, "dataset": RECORDED | {"evaluation": evaluation}},
       f"dataset.evaluation compares .*algorithm.name={name} has a deterministic")
      for environment, names in (("Pendulum-v1", ("td3", "ddpg", "td3_bc")),)
      for name in names for evaluation in ({"every_updates": 10}, {"episodes": 5})),
    *((name, {"dataset": {"path": "data.csv"}}, f"{name} learns only from its own policy.*path=data.csv")
      for name in ON_POLICY),
]  # fmt: skip


@pytest.mark.parametrize(("algorithm", "sections", "words"), ROWS)
def test_config_that_cannot_learn_is_refused(
    algorithm: dict[str, Any] | str, sections: dict[str, Any], words: str
) -> None:
    rollout = {"fragment_steps": 8, "fragments_per_update": 2} | sections.get("rollout", {})
    with pytest.raises(ConfigError, match=words) as caught:
        minimal_config(algorithm=algorithm, **sections | {"rollout": rollout})
    assert "\n" not in str(caught.value)
