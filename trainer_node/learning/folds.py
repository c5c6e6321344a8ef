"""The folds of a run, in the order in which they observe an episode. A new built-in fold is registered here."""

from collections.abc import Mapping

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.base.user_code import import_class, misfit
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.sections import FoldConfig
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.policies.policy import Policy
from stagecoach.trainer_node.learning.curriculum import Curriculum
from stagecoach.trainer_node.learning.fold import Fold
from stagecoach.trainer_node.learning.league import League


def make_folds(config: Config, description: EnvironmentDescription, policies: Mapping[str, Policy]) -> list[Fold]:
    """Returns new folds: the league, the curriculum, and those of the user; raises `ConfigError`."""
    folds: list[Fold] = []
    rating = None
    if config.league is not None:
        league = League(config, description, policies)
        rating, folds = league.rating, [league]
    if config.environment.parameters:
        folds.append(Curriculum(config, description, rating))
    return [*folds, *(_own(name, its) for name, its in config.folds.items())]


def _own(name: str, config: FoldConfig) -> Fold:
    made = import_class(config.path, f"folds.{name}.path", Fold)
    if why := misfit(made, **config.kwargs):
        raise ConfigError(f"folds.{name}.path={config.path} does not take {config.kwargs}: {why}")
    fold = made(**config.kwargs)
    fold.name = name
    return fold
