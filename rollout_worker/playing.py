"""Whole episodes outside of training, by a run's policies or anything else that acts."""

from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial

import numpy as np
import torch

from stagecoach.rollout_worker.environments.factory import evaluation_environment, make_vector
from stagecoach.rollout_worker.environments.parameters import EpisodeParameters
from stagecoach.rollout_worker.environments.seeding import SEEDS
from stagecoach.rollout_worker.environments.vector_env import Step, reject_unusable_now
from stagecoach.rollout_worker.exploration.base import Greedy, Sampling, act_for, no_actions
from stagecoach.rollout_worker.watchdog import Watchdog, WatchedEnvironment
from stagecoach.shared.base import world
from stagecoach.shared.base.errors import EnvironmentFailure
from stagecoach.shared.config.environments.parameters import evaluated_table
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.counters import Duration, Phase
from stagecoach.shared.experience.fragment import LARGEST_SHOWN, EpisodeRecord
from stagecoach.shared.experience.spaces import Array, Columns, EnvironmentDescription
from stagecoach.shared.policies.actor_critic import with_states
from stagecoach.shared.policies.policy import Policy

_ENDLESS_SECONDS = 30.0
"""Time without the end of an episode after which `endless` is called, and as often again."""
Act = Callable[[str, Columns, Array], Columns]
"""Policy id, observations `[S, …]` and the slots that act `[S]` → actions `[S, …]`, ignored for other slots."""


def play_episodes(
    config: Config, description: EnvironmentDescription, seed: int, duration: Duration, act: Act, *,
    begun: Callable[[int], None] = lambda index: None, stepped: Callable[[Step], None] = lambda step: None,
    judged: Callable[[int, EpisodeRecord], EpisodeRecord] = lambda index, record: record,
    endless: Callable[[], None] = lambda: None, watchdog: Watchdog | None = None,
) -> tuple[EpisodeRecord, ...]:  # fmt: skip
    """Plays whole episodes in new environments seeded by `seed`, an equal share each: short episodes are not favored.
    Raises `EnvironmentFailure`, also after `evaluation.deadline_seconds`. `endless` is called while no episode ends."""
    deadline_seconds = config.evaluation.deadline_seconds
    section = evaluation_environment(config, duration.amount)
    table = evaluated_table(config.environment.parameters, config.evaluation.parameters)
    parameters = None if table is None else EpisodeParameters(table, section.num_envs)

    make = partial(make_vector, section, description, parameters)
    with closing(make() if watchdog is None else WatchedEnvironment(make, watchdog)) as environment:
        environment.set_phase(Phase.TEST)
        copies = range(environment.num_envs)
        shares = [(duration.amount + index) // len(copies) for index in copies]
        progress = [0 for _ in copies]
        records: list[list[EpisodeRecord]] = [[] for _ in copies]
        began = environment.reset([(seed + index) % SEEDS for index in copies])
        for index in copies:
            begun(index)
        now = {policy_id: observations for policy_id, (observations, _) in began.items()}
        acts = {policy_id: mask for policy_id, (_, mask) in began.items()}
        started = asked = world.monotonic()
        while any(done < share for done, share in zip(progress, shares, strict=True)):
            if world.monotonic() - started > deadline_seconds:
                raise EnvironmentFailure(
                    f"{duration} did not end within evaluation.deadline_seconds="
                    f"{deadline_seconds:g}; set environment.max_episode_steps, or more time"
                )
            if world.monotonic() - asked > _ENDLESS_SECONDS and not any(progress):
                asked = world.monotonic()
                endless()
            reject_unusable_now(now, acts, description)
            step = environment.step({id_: act(id_, now[id_], acts[id_]) for id_ in description.seated})
            stepped(step)
            now = {policy_id: result.obs for policy_id, result in step.policies.items()}
            acts |= {policy_id: its.acts for policy_id, its in step.policies.items() if its.acts is not None}
            for index, record in step.episodes:
                if progress[index] < shares[index]:
                    records[index].append(judged(index, record))
                    progress[index] += 1 if duration.unit == "episodes" else record.length
                begun(index)
    played = tuple(record for done in records for record in done)
    if not all(abs(record.episode_return) <= LARGEST_SHOWN for record in played):
        found = f"an evaluated episode returned NaN or more than {LARGEST_SHOWN:g}"
        raise EnvironmentFailure(f"{found}; look at the environment's rewards")
    return played


@torch.inference_mode()
def evaluate_policies(
    config: Config, description: EnvironmentDescription, policies: Mapping[str, Policy], seed: int,
    episodes: int | None = None, endless: Callable[[], None] = lambda: None, watchdog: Watchdog | None = None,
) -> tuple[EpisodeRecord, ...]:  # fmt: skip
    """Plays `episodes` episodes (default: as the section `evaluation` says), all agents acting by their policies."""
    evaluation = config.evaluation
    asked = evaluation.asked if episodes is None else Duration(episodes, "episodes")
    exploration, generator = Greedy() if evaluation.greedy else Sampling(), torch.Generator().manual_seed(seed)
    copies = evaluation_environment(config, asked.amount).num_envs
    remembering = with_states(policies, {policy_id: copies * description.slots(policy_id) for policy_id in policies})
    acting = {**policies, **remembering}

    def act(policy_id: str, observations: Columns, acts: Array) -> Columns:
        if not description.in_turns:
            tensors = {name: torch.from_numpy(array) for name, array in observations.items()}
            chosen, _ = exploration.act(acting[policy_id], tensors, generator)
            return {name: tensor.numpy() for name, tensor in chosen.items()}
        actions, rows = no_actions(description.policies[policy_id].action, len(acts)), np.flatnonzero(acts)
        if len(rows):
            for name, array in act_for(exploration, acting[policy_id], observations, rows, generator)[0].items():
                actions[name][rows] = array
        return actions

    def stepped(step: Step) -> None:
        for policy_id, its in remembering.items():
            if policy_id in description.seated:
                its.forget(torch.from_numpy(step.policies[policy_id].over))

    return play_episodes(config, description, seed, asked, act, stepped=stepped, endless=endless, watchdog=watchdog)
