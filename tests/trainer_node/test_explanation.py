"""Explanation: the fragments' parts of an update are all of it, and looking changes nothing that is learned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stagecoach.shared.base.errors import ArchiveIncomplete, UserError
from stagecoach.shared.experience.fragment import Fragment
from stagecoach.trainer_node.replay.explanation import EpisodeLabels, Influence, _BatchWatch, explain
from stagecoach.trainer_node.replay.rerun import rerun
from tests.support.runs.game import STEPS_PER_UPDATE, NewGame, archived, damage, small

ON_POLICY = [
    {"name": "ppo"}, {"name": "a2c"}, {"name": "a2c", "normalize_advantages": True}, {"name": "appo"},
    {"name": "impala"}, {"name": "pqn"},
]  # fmt: skip


@pytest.mark.parametrize("algorithm", ON_POLICY, ids=lambda its: "-".join(map(str, its.values())))
def test_gradients_of_fragments_add_up_to_the_updates(new_game: NewGame, algorithm: dict[str, Any]) -> None:
    check_sum(new_game, algorithm=algorithm)


def test_gradients_of_sequences_add_up_to_the_updates(new_game: NewGame) -> None:
    core = {"hidden_sizes": [8], "core": "gru", "core_size": 8, "share_encoder": True}
    check_sum(new_game, by_episode=False, policies={"default": core})


def whole_ones(taken: list[Fragment], ended: list[Influence]) -> list[Influence]:
    """Returns the episodes, which CartPole pays 1 a step, that begin and end in the same fragment."""
    ends = {item.position: item.columns["default"]["terminated"] for item in taken}
    return [each for each in ended if ends[each.position][: each.last_step, each.slot].any()]


def check_sum(new_game: NewGame, by_episode: bool = True, **sections: Any) -> None:
    sections = {"policies": {"default": {"hidden_sizes": [8]}}} | sections
    game = new_game(archived(rollout={"fragments_per_update": 3, "fragment_steps": 8}, **sections))
    game.another_worker(1)
    for _ in range(30):
        for worker in (game.worker, *game.others):
            worker.step(0)
        if game.trainer.step(0) == "ended":
            break
    game.finish()
    checkpoints, role = game.role.checkpoints, game.role
    goal = checkpoints.load(checkpoints.names()[-1])
    with rerun(checkpoints, role.config, role.description(), "start", goal) as again:
        algorithm: Any = again.learner.algorithms["default"]
        while again.version < goal.manifest.version:
            taken, wholes = again.take(), list[torch.Tensor]()
            watch = _BatchWatch(algorithm, "default", taken, EpisodeLabels(role.description()))

            def both(batch: Any, arguments: Any, watch: Any = watch, wholes: Any = wholes) -> None:
                watch(batch, arguments)
                with torch.enable_grad():
                    loss, _ = algorithm.loss(batch, *arguments)
                    parts = torch.autograd.grad(loss, list(algorithm.policy.parameters()), allow_unused=True)
                each = zip(parts, algorithm.policy.parameters(), strict=True)
                wholes.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in each]))

            algorithm.watch = both
            again.learn(taken)
            (whole,) = wholes
            for parts in (watch.found, [its for _, _, its in watch._episodes]) if by_episode else (watch.found,):
                gradients = [its.gradient for its in parts if its.gradient is not None]
                torch.testing.assert_close(sum(gradients), whole, rtol=1e-3, atol=1e-5)
            told, episodes = watch.influences()
            assert bool(episodes) == by_episode
            if by_episode:
                assert sum(each.share for each in episodes) == pytest.approx(1.0)
                assert sum(each.transitions for each in episodes) == sum(each.transitions for each in told)
                ended = [each for each in episodes if each.last_step is not None]
                records = sorted(record.episode_return for item in taken for record in item.header.episodes)
                assert sorted(each.mean_return for each in ended if each.mean_return is not None) == records
                assert all(each.mean_return == each.transitions for each in whole_ones(taken, ended))
            assert sum(each.share for each in told) == pytest.approx(1.0)
            assert [each.position for each in told] == [item.position for item in taken]
            assert {each.worker for each in told} <= {"worker-0", "worker-1"}
        expected = goal.manifest.objects
    assert again.snapshot().checkpoint.manifest.objects == expected, "looking changes nothing"


def test_td_errors_of_drawn_rows_are_summed_by_fragment(new_game: NewGame) -> None:
    dqn = {"name": "dqn", "minibatch_size": 16, "gradient_steps_per_env_step": 0.1}
    game = new_game(archived(algorithm=dqn, policies={"default": {"hidden_sizes": [8]}}))
    game.finish()
    found = explain(game.role.checkpoints, game.role.config, game.role.description(), 6, 2)
    assert found.versions == (5, 6) and set(found.metrics) == {5, 6}
    for version in (5, 6):
        its = [each for each in found.influences if each.version == version]
        drawn = sum(each.transitions for each in its)
        assert drawn == 16 * int(found.metrics[version]["train/gradient_steps"])
        assert sum(each.share for each in its) == pytest.approx(1.0)
        mean = sum((each.td_error or 0) * each.transitions for each in its) / drawn
        assert mean == pytest.approx(found.metrics[version]["train/td_error"], rel=1e-4)
        assert {each.worker for each in its} == {"worker-0"}
        episodes = [each for each in found.episodes if each.version == version]
        assert sum(each.transitions for each in episodes) == drawn
        assert sum(each.share for each in episodes) == pytest.approx(1.0)
        assert len(episodes) > len(its) and any(each.mean_return is not None for each in episodes)


def test_versions_that_are_not_there_are_refused(new_game: NewGame) -> None:
    game = new_game(archived())
    game.finish()
    role = game.role
    for version, last, words in [(7, 1, "versions 1 to 6"), (2, 3, "expected 1 to 2"), (1, 0, "expected 1 to 1")]:
        with pytest.raises(UserError, match=words):
            explain(role.checkpoints, role.config, role.description(), version, last)
    other = new_game(small())
    other.finish()
    with pytest.raises(ArchiveIncomplete, match="archive=all"):
        explain(other.role.checkpoints, other.role.config, other.role.description(), 6)


def test_abandoned_version_names_the_rollback(new_game: NewGame) -> None:
    game = new_game(archived())
    game.play_to(5, durable=True)
    game.crash()
    damage(game, f"4_Step-{4 * STEPS_PER_UPDATE}.ckpt")
    game.restart()  # the log behind version 2 is trimmed, so it continues as version 6
    game.finish()
    role = game.role
    for version, last, asked in [(5, 1, "to version 5"), (6, 1, "to version 6"), (7, 2, "to versions 6 to 7")]:
        with pytest.raises(UserError) as caught:
            explain(role.checkpoints, role.config, role.description(), version, last)
        went = f"with version 6 the run went back to 2_Step-{2 * STEPS_PER_UPDATE}.ckpt and abandoned"
        assert asked in str(caught.value) and went in str(caught.value)
        newest = role.checkpoints.manifest(role.checkpoints.resolve("latest")).version
        assert f"explained: 1 to 4, 7 to {newest};" in str(caught.value)
    assert explain(role.checkpoints, role.config, role.description(), 7).start.startswith("6_")
