"""Whole episodes outside of training: by a run's policies (evaluation), or by any two players (a match)."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from itertools import count
from statistics import fmean

import numpy as np
import torch

from stagecoach.rollout_worker.environments.factory import evaluation_environment, make_vector
from stagecoach.rollout_worker.environments.parameters import EpisodeParameters
from stagecoach.rollout_worker.environments.seeding import SEEDS, episode_seed
from stagecoach.rollout_worker.environments.vector_env import Step, VectorEnvironment, reject_unusable_now
from stagecoach.rollout_worker.exploration.base import Greedy, Sampling, act_for, no_actions
from stagecoach.rollout_worker.league.casting import Casting
from stagecoach.rollout_worker.league.opponents import Opponents
from stagecoach.rollout_worker.watchdog import Watchdog, WatchedEnvironment
from stagecoach.shared.base.errors import EnvironmentFailure
from stagecoach.shared.config.environments.parameters import evaluated_table
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.counters import Duration, Phase
from stagecoach.shared.experience.fragment import LARGEST_SHOWN, EpisodeRecord, MatchRecord
from stagecoach.shared.experience.spaces import Array, Columns, EnvironmentDescription
from stagecoach.shared.league.matchmaking import Match
from stagecoach.shared.league.table import MatchTable, PlayerRef, sides_of
from stagecoach.shared.policies.actor_critic import with_states
from stagecoach.shared.policies.policy import Policy

Act = Callable[[str, Columns, Array], Columns]
"""Policy id, observations `[S, …]` and the slots that act `[S]` → actions `[S, …]`, ignored for other slots."""


def _play(
    config: Config, description: EnvironmentDescription, seed: int, asked: Duration, act: Act, *,
    begun: Callable[[int], None] = lambda index: None, stepped: Callable[[Step], None] = lambda step: None,
    judged: Callable[[int, EpisodeRecord], EpisodeRecord] = lambda index, record: record,
    watchdog: Watchdog | None = None,
) -> tuple[EpisodeRecord, ...]:  # fmt: skip
    """Plays `asked` episodes, or whole episodes for `asked` steps, in new environments seeded by `seed`.

    Each environment plays its share, so that short episodes are not favored. Raises `EnvironmentFailure`, also after
    `evaluation.deadline_seconds`.
    """
    deadline_seconds = config.evaluation.deadline_seconds

    section = evaluation_environment(config, asked.amount)
    table = evaluated_table(config.environment.parameters, config.evaluation.parameters)
    parameters = None if table is None else EpisodeParameters(table, section.num_envs)

    def make() -> VectorEnvironment:
        return make_vector(section, description, parameters)

    with closing(make() if watchdog is None else WatchedEnvironment(make, watchdog)) as environment:
        environment.set_phase(Phase.TEST)
        copies = range(environment.num_envs)
        shares = [(asked.amount + index) // len(copies) for index in copies]
        progress = [0 for _ in copies]
        records: list[list[EpisodeRecord]] = [[] for _ in copies]
        began = environment.reset([(seed + index) % SEEDS for index in copies])
        for index in copies:
            begun(index)
        now = {policy_id: observations for policy_id, (observations, _) in began.items()}
        acts = {policy_id: mask for policy_id, (_, mask) in began.items()}
        started = time.monotonic()
        while any(done < share for done, share in zip(progress, shares, strict=True)):
            if time.monotonic() - started > deadline_seconds:
                raise EnvironmentFailure(
                    f"{asked} did not end within evaluation.deadline_seconds="
                    f"{deadline_seconds:g}; set environment.max_episode_steps, or more time"
                )
            reject_unusable_now(now, acts, description)
            step = environment.step({id_: act(id_, now[id_], acts[id_]) for id_ in description.seated})
            stepped(step)
            now = {policy_id: result.obs for policy_id, result in step.policies.items()}
            acts |= {policy_id: its.acts for policy_id, its in step.policies.items() if its.acts is not None}
            for index, record in step.episodes:
                if progress[index] < shares[index]:
                    records[index].append(judged(index, record))
                    progress[index] += 1 if asked.unit == "episodes" else record.length
                begun(index)
    played = tuple(record for done in records for record in done)
    if not all(abs(record.episode_return) <= LARGEST_SHOWN for record in played):
        found = f"an evaluated episode returned NaN or more than {LARGEST_SHOWN:g}"
        raise EnvironmentFailure(f"{found}; look at the environment's rewards")
    return played


@torch.inference_mode()
def evaluate_policies(
    config: Config, description: EnvironmentDescription, policies: Mapping[str, Policy], seed: int,
    episodes: int | None = None, watchdog: Watchdog | None = None,
) -> tuple[EpisodeRecord, ...]:  # fmt: skip
    """Plays `episodes` episodes (default: as the section `evaluation` says), with all agents acting by their policies.

    Raises `EnvironmentFailure`, also after `evaluation.deadline_seconds`.
    """
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

    return _play(config, description, seed, asked, act, stepped=stepped, watchdog=watchdog)


def playable(seats: Sequence[str], own: Collection[str], others: Collection[str]) -> list[int]:
    """Returns the sides of `seats` for a player that fits `own`, if another that fits `others` takes the rest."""
    return [
        side
        for side, seat in enumerate(seats)
        if seat in own and all(each in others for other, each in enumerate(seats) if other != side)
    ]


@dataclass(frozen=True)
class Played:
    """Result of one game of a match."""

    match: MatchRecord
    returns: tuple[float, ...]
    """Mean return of each side's agents."""


def play_sides(
    config: Config, description: EnvironmentDescription, players: Mapping[str, PlayerRef],
    fits: Sequence[Collection[str]], *, opponents: Opponents, policies: Mapping[str, Policy], games: int, seed: int,
    watchdog: Watchdog | None = None,
) -> dict[int, tuple[Played, ...]]:  # fmt: skip
    """Plays `games` games of two `players` for each side that the first can take; the other takes all other sides.

    `fits` are the policies whose seats each player can take. Returns the games by side; empty if no side is possible.
    """
    sides, seats = sides_of(config.league.sides if config.league else (), description.agents)
    (mine, theirs), table, played = players, MatchTable(sides, seats, {}, dict(players)), {}
    for side in playable(seats, *fits):
        lineup = [mine if other == side else theirs for other in range(len(seats))]
        seeds = seed, episode_seed(seed, 1 + side)  # each side has its own random stream
        played[side] = play_match(
            config, description, table, lineup, opponents=opponents, policies=policies, games=games, seeds=seeds,
            watchdog=watchdog,
        )  # fmt: skip
    return played


@torch.inference_mode()
def play_match(
    config: Config, description: EnvironmentDescription, table: MatchTable, lineup: Sequence[str], *,
    opponents: Opponents, policies: Mapping[str, Policy], games: int, seeds: tuple[int, int],
    watchdog: Watchdog | None = None,
) -> tuple[Played, ...]:  # fmt: skip
    """Plays `games` games with the players of `lineup`, one per side, from `table.players`.

    `seeds` are for the starts, which are equal for all players, and for actions. `policies` are any with these spaces,
    by policy id.
    """
    copies = evaluation_environment(config, games).num_envs
    casting, generator = Casting(description, copies, table, opponents, lambda text: None), torch.Generator()
    generator.manual_seed(seeds[1])

    def act(group: str, observations: Columns, acts: Array) -> Columns:
        actions = no_actions(description.policies[group].action, len(acts))
        parts = list(casting.parts(group, np.flatnonzero(acts)))
        with nullcontext() if watchdog is None else watchdog.during("the players of a match"):
            casting.act(parts, group, observations, policies[group], generator, actions)
        return actions

    def stepped(step: Step) -> None:
        for group, its in step.policies.items():
            casting.forget(group, its.over)

    begins = [count() for _ in range(copies)]

    def begun(index: int) -> None:
        casting.seat(index, Match("", 0, tuple(lineup)), episode_seed(seeds[1] + index, next(begins[index])))

    records = _play(
        config,
        description,
        seeds[0],
        Duration(games, "episodes"),
        act,
        begun=begun,
        stepped=stepped,
        judged=casting.judged,
        watchdog=watchdog,
    )
    return tuple(
        Played(its.match, tuple(fmean(its.agent_returns[agent] for agent in side) for side in table.sides))
        for its in records if its.match is not None
    )  # fmt: skip
