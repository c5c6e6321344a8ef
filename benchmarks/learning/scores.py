"""What the judges say of a checkpoint, as scores that are better the higher they are. Each takes the checkpoint's
policy and a function that loads the snapshots in its league, oldest first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from benchmarks.learning import games, judges
from stagecoach.shared.deployment.deployed_policy import DeployedPolicy

Snapshots: TypeAlias = Callable[[], Sequence[DeployedPolicy]]
_PAIRS = 100


def tic_tac_toe(policy: DeployedPolicy, snapshots: Snapshots) -> float:
    """Less the lines of play that it loses, in both seats; 0 is unbeatable."""
    best = judges.greedy(judges.strategy(policy))
    return -sum(judges.lost_lines(best, seat) for seat in (1, 2))


def _later(snapshots: Snapshots, part: float = 0.5) -> list[judges.Strategy]:
    """The strategies of the newer ones: the mean of all would hold on to what the first ones did not know."""
    found = snapshots()
    return [judges.strategy(each) for each in found[len(found) - math.ceil(part * len(found)) :]]


def kuhn_poker(policy: DeployedPolicy, snapshots: Snapshots) -> float:
    """Less the exploitability of the mean strategy of the newer half of the snapshots."""
    return -judges.exploitability("kuhn_poker", *_later(snapshots))


def kuhn_poker_policy(policy: DeployedPolicy, snapshots: Snapshots) -> float:
    """Less the exploitability of the policy alone."""
    return -judges.exploitability("kuhn_poker", judges.strategy(policy))


def leduc_poker(policy: DeployedPolicy, snapshots: Snapshots) -> float:
    """As `kuhn_poker`, of the newer three quarters: it swings more, and the first quarter is enough to forget."""
    return -judges.exploitability("leduc_poker", *_later(snapshots, 0.75))


def rock_paper_scissors(policy: DeployedPolicy, snapshots: Snapshots) -> float:
    """As `kuhn_poker`."""
    mixed = np.mean([judges.throws(each) for each in _later(snapshots)], axis=0)
    return -judges.throws_exploitability(mixed)


def rock_paper_scissors_cycle(policy: DeployedPolicy, snapshots: Snapshots) -> float:
    """The exploitability of the worst of the current strategy and all snapshots: a control has it high at some point,
    since it runs in circles, which a single moment may not show."""
    each = [policy, *snapshots()]
    return max(judges.throws_exploitability(judges.throws(judges.strategy(one))) for one in each)


def connect_four(policy: DeployedPolicy, snapshots: Snapshots) -> float:
    """The share of games that it wins, half of them in each seat, against minimax of four plies."""
    player = judges.greedy_player(policy)
    won, _, _ = judges.match(games.connect_four, player, judges.minimax_of_four_plies, _PAIRS)
    return won / (2 * _PAIRS)
