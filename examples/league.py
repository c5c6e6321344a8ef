"""A scripted player of tic-tac-toe for examples/league.yaml: wins if it can, else keeps the other side from winning."""

from typing import Any

import numpy as np


def careful(observation: dict[str, Any], random: np.random.Generator) -> int:
    """The observation as the environment gives it (`observation` `[3, 3, 2]`: own marks and the other side's;
    `action_mask` `[9]`); everything random comes from `random`, so that a resumed run plays on as it would have."""
    legal = np.flatnonzero(observation["action_mask"]).tolist()
    for side in (0, 1):
        marks = observation["observation"][..., side].reshape(9) > 0
        for square in legal:
            if _wins(marks, square):
                return int(square)
    return int(random.choice(legal))


def _wins(marks: np.ndarray, square: int) -> bool:
    """Returns whether these marks and `square` are three in a row."""
    after = marks.copy()
    after[square] = True
    board = after.reshape(3, 3)
    return bool(board.all(0).any() or board.all(1).any() or board.diagonal().all() or board[:, ::-1].diagonal().all())
