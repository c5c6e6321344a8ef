"""The draw of an episode's match: a pure function of the match table and the episode's place in its seed lineage."""

from dataclasses import dataclass

import numpy as np

from stagecoach.shared.league.table import MatchTable

_STREAM = 0x6D61746368
"""Sets the draw's random numbers apart from all others that follow from the same seed."""


@dataclass(frozen=True)
class Match:
    learner: str
    """Name in `MatchTable.learners`."""
    side: int
    """Index of the learner's side."""
    players: tuple[str, ...]
    """Player id per side; the learner's own side has its policy id."""


def draw(table: MatchTable, environment: int, episode: int, seed: int) -> Match:
    """The match of one episode.

    Learners, and the sides of each, take turns by `environment + episode`; opponents follow from `seed`.

    Args:
        table: as published with the policy version that begins the episode.
        environment: index of the environment in its worker.
        episode: how many episodes that environment has begun before.
        seed: of the episode.
    """
    names, turn = sorted(table.learners), environment + episode
    learner = table.learners[names[turn % len(names)]]
    side = learner.sides[turn // len(names) % len(learner.sides)]
    random = np.random.default_rng(np.random.SeedSequence([seed, _STREAM]))
    players = tuple(
        learner.policy if other == side else _drawn(learner.opponents[seat], float(random.random()))
        for other, seat in enumerate(table.seats)
    )
    return Match(names[turn % len(names)], side, players)


def _drawn(opponents: tuple[tuple[str, float], ...], number: float) -> str:
    for player, probability in opponents:
        number -= probability
        if number < 0:
            return player
    return next(player for player, probability in reversed(opponents) if probability > 0)  # by rounding
