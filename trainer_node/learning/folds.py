"""The folds of a run, in the order in which they observe an episode. A new built-in fold is registered here."""

from collections.abc import Mapping

from stagecoach.shared.base.user_code import make_own
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.policies.policy import Policy
from stagecoach.trainer_node.learning.curriculum import Curriculum
from stagecoach.trainer_node.learning.fold import Fold
from stagecoach.trainer_node.learning.league import League
from stagecoach.trainer_node.learning.own_fold import OwnFold


def make_folds(config: Config, description: EnvironmentDescription, policies: Mapping[str, Policy]) -> list[Fold]:
    """Returns new folds: the league, the curriculum, and those of the user; raises `ConfigError`."""
    folds: list[Fold] = []
    rating = None
    if config.league is not None:
        league = League(config, description, policies)
        rating, folds = league.rating, [league]
    if config.environment.parameters:
        folds.append(Curriculum(config, description, rating))
    return [*folds, *own_folds(config)]


def own_folds(config: Config) -> list[Fold]:
    """Returns new folds of the user's classes; raises `ConfigError`."""
    folds: list[Fold] = []
    for name, section in config.folds.items():
        fold = make_own(section.path, f"folds.{name}.path", Fold, **section.kwargs)
        fold.name = name
        folds.append(OwnFold(fold))
    return folds
