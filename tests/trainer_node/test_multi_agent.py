"""Two agents of a PettingZoo environment on two policies, through worker, Redis, trainer and store: the one path."""

from __future__ import annotations

from collections.abc import Callable

from rollout_worker.evaluator import Evaluator
from rollout_worker.worker import Worker
from shared.checkpoint import FINISHED
from shared.events import read_evaluations
from shared.ledger import read_books
from shared.policies.codec import decode_policy, state_arrays
from shared.role import Role
from tests.conftest import minimal_config
from tests.environments_for_tests import MODULE
from trainer_node.trainer import Trainer


def test_two_agents_train_two_policies_through_the_same_path(make_role: Callable[..., Role]) -> None:
    config = minimal_config(
        environment={"id": f"{MODULE}:Chase", "api": "pettingzoo", "num_envs": 4, "kwargs": {"cat_steps": 2}},
        policies={"hunter": {"hidden_sizes": [8]}, "prey": {"hidden_sizes": [8], "normalise_observations": True}},
        agents={"cat": "hunter", "mouse": "prey"},
        evaluation={"episodes": 4, "final_wait_seconds": 0},
        algorithm={"minibatch_size": 16, "epochs": 2, "learning_rate": 0.01},
    )
    role = make_role(config)
    trainer, worker, evaluator = (
        Trainer(make_role(config), None),
        Worker(make_role(config), 0),
        Evaluator(make_role(config)),
    )
    trainer.start()
    worker.start()
    evaluator.start()
    untrained = {name: state_arrays(policy) for name, policy in trainer._learner.policies.items()}
    while (word := trainer.step(0)) != "ended":
        assert word in {"updated", "waited"}
        assert worker.step(0) in {"pushed", "waited"}
    evaluator.step(0)
    assert trainer.finish("exhausted") == "exhausted"
    worker.stop("finished")
    evaluator.stop("finished")

    checkpoint = role.checkpoints.load_latest()
    assert checkpoint is not None and checkpoint.manifest.version == 4
    assert {"hunter/policy.safetensors", "prey/policy.safetensors"} <= set(checkpoint.objects)
    assert {name.partition("/")[0] for name in checkpoint.objects} == {"hunter", "prey", "trainer"}
    for name, before in untrained.items():
        trained, version = decode_policy(checkpoint.objects[f"{name}/policy.safetensors"])
        assert version == 4
        after = state_arrays(trained)
        assert any((after[key] != array).any() for key, array in before.items()), f"{name} has learnt nothing"

    total = read_books(role.redis, role.run_id)["total"]
    assert total.balances and total.consumed.fragments == 4 * config.rollout.fragments_per_update
    assert not total.dropped and total.consumed.transitions == 4 * 2 * 8 * 4
    finished = role.checkpoints.marker(FINISHED)
    assert finished is not None and finished["reason"] == "exhausted"
    assert finished["counters"]["train"] == {"env_steps": 256, "episodes": 64, "updates": 4}
    scores = read_evaluations(role.redis, role.run_id)
    assert all(item["episodes"] == 4 and item["mean_length"] == 4.0 for item in scores.values()) and scores
