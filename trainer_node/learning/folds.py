"""The folds of a run, in the order in which they observe an episode. A new built-in fold is registered here."""

from collections.abc import Mapping

from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.policies.policy import Policy
from stagecoach.trainer_node.learning.curriculum import Curriculum
from stagecoach.trainer_node.learning.fold import Fold
from stagecoach.trainer_node.learning.league import League


def make_folds(config: Config, description: EnvironmentDescription, policies: Mapping[str, Policy]) -> list[Fold]:
    """New folds: the league, the curriculum."""
    folds: list[Fold] = []
    rating = None
    if config.league is not None:
        league = League(config, description, policies)
        rating, folds = league.rating, [league]
    if config.environment.parameters:
        folds.append(Curriculum(config, description, rating))
    return folds
