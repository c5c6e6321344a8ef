"""Which way to explore a config section asks for."""

from __future__ import annotations

from rollout_worker.action_noise import GaussianNoise, OrnsteinUhlenbeckNoise, ParameterNoise, TruncatedGaussianNoise
from rollout_worker.choosing import Boltzmann, EpsilonGreedy, OneHead, UpperConfidenceBound
from rollout_worker.exploration import Exploration, Sampling
from shared import exploration_config as sections
from shared.steps import Counters


def make_exploration(config: sections.ExplorationConfig, counters: Counters) -> Exploration:
    """As an algorithm explores, at these counters of the trainer."""
    match config:
        case sections.Sampling():
            return Sampling()
        case sections.EpsilonGreedy():
            return EpsilonGreedy(config.epsilon.value(counters))
        case sections.Boltzmann():
            return Boltzmann(config.temperature.value(counters))
        case sections.UpperConfidenceBound():
            return UpperConfidenceBound(config.coefficient.value(counters), config.epsilon.value(counters))
        case sections.Bootstrapped():
            return OneHead(config.epsilon.value(counters))
        case sections.TruncatedGaussianNoise():
            return TruncatedGaussianNoise(config.sigma.value(counters))
        case sections.OrnsteinUhlenbeckNoise():
            return OrnsteinUhlenbeckNoise(config.sigma.value(counters), config.theta)
        case sections.ParameterNoise():
            return ParameterNoise(config.sigma.value(counters))
        case sections.GaussianNoise():
            return GaussianNoise(config.sigma.value(counters), config.bound)
