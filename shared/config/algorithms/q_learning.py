"""Sections of DQN and its descendants: Rainbow, R2D2, VDN, QMIX."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from stagecoach.shared.config.algorithms.base import BatchOfUpdate, MarginCloningConfig, Signals
from stagecoach.shared.config.algorithms.exploration import EpsilonGreedy, ExplorationField, Sampling
from stagecoach.shared.config.algorithms.off_policy import OffPolicyConfig
from stagecoach.shared.config.algorithms.replay_buffer import PrioritizedReplay, ReplayBufferField
from stagecoach.shared.config.schema.section import Schedule, ScheduleField

_ONE_HEAD: Mapping[str, tuple[Any, ...]] = {"head": ("expected",), "heads": (1,), "noisy": (False,)}


class QLearningConfig(OffPolicyConfig):
    """Fields of algorithms that learn the values of discrete actions."""

    policy = "q_network"
    defaults: ClassVar[Mapping[str, Any]] = {
        **OffPolicyConfig.defaults,
        "policies": {"hidden_sizes": [120, 84], "activation": "relu"},  # CleanRL's
    }
    exploration: ExplorationField = EpsilonGreedy()
    """Exploration: `epsilon_greedy`, `boltzmann`, `parameter_noise`; `sampling`, which needs `noisy`; `ucb` or
    `bootstrapped`, which need `heads`."""
    gradient_steps_per_env_step: float = Field(0.25, gt=0, le=1000)
    """Gradient steps per env step (the replay ratio): one for four, as in the paper."""
    target_update_steps: int = Field(500, ge=1)
    """Gradient steps between two updates of the target network."""
    tau: float = Field(1.0, gt=0, le=1)
    """Interpolation factor of each target update; 1 copies the network."""
    double: bool = True
    """Selects the bootstrap action by the online network (double Q-learning, van Hasselt et al. 2016)."""
    dueling: bool = False
    """Dueling streams: state value and action advantages (Wang et al. 2016)."""
    noisy: bool = False
    """Learned noise on the weights of the last layers (Fortunato et al. 2018)."""
    head: Literal["expected", "c51", "qr", "hl_gauss"] = "expected"
    """Model of the return: its mean, a distribution over atoms (Bellemare et al. 2017), or quantiles (Dabney et al.
    2018). `hl_gauss` learns the mean by classification: a normal distribution around it (Farebrother et al. 2024)."""
    atoms: int = Field(51, ge=2)
    """Heads `c51` and `hl_gauss`: number of atoms, or of classes."""
    v_min: float = -10.0
    """The same: smallest return; smaller returns are clipped. Depends on discount, n_step and reward scale."""
    v_max: float = 10.0
    """The same: the largest return."""
    smoothing: float = Field(0.75, gt=0)
    """Head `hl_gauss`: standard deviation of the normal distribution, in distances between two classes."""
    quantiles: int = Field(200, ge=1)
    """Head `qr`: number of quantiles."""
    heads: int = Field(1, ge=1, le=100)
    """Heads of an ensemble on one encoder (Osband et al. 2016; 10 there), whose disagreement guides exploration `ucb`
    or `bootstrapped`. The best action has the largest mean."""
    bootstrap_share: float = Field(0.5, gt=0, le=1)
    """Share of the transitions in each head's bootstrap sample."""
    prior_scale: float = Field(0.0, ge=0)
    """Scale of a fixed random network added to each head (randomized priors, Osband et al. 2018; 3 there), so that
    heads disagree on unfamiliar states. 0: none."""
    loss: Literal["huber", "squared"] = "huber"
    """Head `expected`: loss of the TD error; `huber` bounds its gradient to 1, as DQN's does."""

    def network(self) -> dict[str, Any]:
        """Returns keyword arguments of `QNetwork`."""
        names = {"head", "dueling", "noisy", "atoms", "v_min", "v_max", "quantiles", "heads", "prior_scale"}
        return {name: getattr(self, name) for name in sorted(names)}

    def _works_with(self, **needed: tuple[Any, ...]) -> Self:
        """Raises `ValueError` if a field (or a section's `kind`) has none of the supported values."""
        for name, values in needed.items():
            found = getattr(self, name)
            name, found = (name, found) if not hasattr(found, "kind") else (f"{name}.kind", found.kind)
            if found not in values:
                several = " or ".join(str(value) for value in values)
                raise ValueError(f"{name}={found} with {self.name}, which works with {name}={several} only; set that")
        return self

    @model_validator(mode="after")
    def _what_cannot_be(self) -> Self:
        if self.v_min >= self.v_max:
            raise ValueError(f"v_min={self.v_min} is not below v_max={self.v_max}")
        if self.prior_scale and (self.heads == 1 or self.head in ("c51", "hl_gauss")):
            raise ValueError(
                f"prior_scale={self.prior_scale:g} with heads={self.heads} and head={self.head}: priors are added to "
                f"the values of an ensemble; set heads to 10 and head to expected or qr, or prior_scale=0"
            )
        if self.heads > 1 and self.noisy:
            raise ValueError(
                f"heads={self.heads} with noisy=true: an ensemble and noisy weights are two ways to explore"
            )
        return self


class Guided(Signals, QLearningConfig):
    """Fields of algorithms that can also use demonstrations and reward signals."""

    behavioral_cloning: MarginCloningConfig | None = None
    """`{strength: {kind: linear, start: 1, end: 0, over: 50000 env_steps}}` clones `demonstrations` as well, by a large
    margin (Hester et al. 2018)."""


class DQNConfig(Guided):
    """Deep Q-learning (Mnih et al. 2015), with any of its extensions."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.dqn:DQN"
    name: str = "dqn"


class VDNConfig(QLearningConfig):
    """Value decomposition (Sunehag et al. 2018): the team's value is the sum of its agents'."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.qmix:VDN"
    name: str = "vdn"
    team_reward: Literal["mean", "sum"] = "mean"
    """Team reward from the agents' rewards: `mean` where the environment pays each agent the team's reward."""

    @model_validator(mode="after")
    def _of_one_step_and_one_head(self) -> Self:
        return self._works_with(**_ONE_HEAD, n_step=(1,), replay_buffer=("uniform",))


class QMIXConfig(VDNConfig):
    """QMIX (Rashid et al. 2018): the team's value is a monotonic function of the agents' values, conditioned on the
    observations."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.qmix:QMIX"
    name: str = "qmix"
    mixing_units: int = Field(32, ge=1)
    """Units of the mixing network's hidden layer."""


class R2D2Config(QLearningConfig):
    """Recurrent replay distributed DQN (Kapturowski et al. 2019): Q-learning on sequences with stored hidden states,
    with an LSTM or a GRU (`policies.<id>.core`)."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.r2d2:R2D2"
    recurrent_policy: ClassVar[str | None] = "recurrent_q_network"
    defaults: ClassVar[Mapping[str, Any]] = {
        **QLearningConfig.defaults,
        "policies": {**QLearningConfig.defaults["policies"], "core": "lstm", "share_encoder": True},
        "rollout": {"fragment_steps": 40, "fragments_per_update": 1, "max_policy_lag": 2},
    }
    name: str = "r2d2"
    gamma: float = Field(0.997, ge=0, le=1)
    replay_buffer: ReplayBufferField = PrioritizedReplay(alpha=0.9, beta=Schedule(start=0.6))
    minibatch_size: int = Field(640, ge=1)
    """Transitions in one gradient step: ⌊minibatch_size / rollout.fragment_steps⌋ sequences, each of one fragment and
    slot (64 sequences of 80 steps in the paper)."""
    gradient_steps_per_env_step: float = Field(0.025, gt=0, le=1000)
    """Gradient steps per env step. With minibatches of 640, each transition is used 16 times."""
    n_step: int = Field(5, ge=1, le=1000)
    dueling: bool = True
    adam_epsilon: float = Field(1e-3, gt=0)
    burn_in_fragments: int = Field(1, ge=0, le=100)
    """Fragments before a sequence that refresh the hidden state without learning. 0: start from the stored state."""
    priority_mix: float = Field(0.9, ge=0, le=1)
    """η: a sequence's priority is η · the largest TD error of its steps + (1 − η) · their mean."""
    rescale_values: bool = True
    """Learns h(Q) = sign(Q)(√(|Q| + 1) − 1) + ε Q, ε = 0.001, instead of clipping rewards."""

    def network(self) -> dict[str, Any]:
        """Returns the arguments of `QNetwork`, and whether its values are h(Q)."""
        return super().network() | ({"rescaled": True} if self.rescale_values else {})

    def sequences(self, fragment_steps: int) -> int:
        """Number of sequences in a minibatch, at least one."""
        return max(1, self.minibatch_size // fragment_steps)

    @model_validator(mode="after")
    def _of_one_head_on_sequences(self) -> Self:
        return self._works_with(
            **_ONE_HEAD, replay_buffer=("prioritized", "uniform"), exploration=("epsilon_greedy", "boltzmann")
        )


class RainbowConfig(Guided):
    """DQN with all its extensions (Hessel et al. 2018), with that paper's defaults."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.dqn:DQN"
    name: str = "rainbow"
    learning_rate: ScheduleField = Schedule(start=6.25e-5)
    """Adam's step size; small networks on vectors tolerate ten times as much."""
    replay_buffer: ReplayBufferField = PrioritizedReplay(alpha=0.5)
    exploration: ExplorationField = Sampling()
    """Exploration by the noise of the network's weights."""
    n_step: int = Field(3, ge=1, le=1000)
    dueling: bool = True
    noisy: bool = True
    head: Literal["expected", "c51", "qr", "hl_gauss"] = "c51"
    adam_epsilon: float = Field(1.5e-4, gt=0)


class PQNConfig(BatchOfUpdate):
    """Parallelized Q-network (Gallici et al. 2024): Q-learning on each update's batch, without replay buffer and target
    network."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.pqn:PQN"
    policy: ClassVar[str] = "q_network"
    learns_from_others: ClassVar[bool] = False
    corrects_policy_lag: ClassVar[bool] = False
    noisy: ClassVar[bool] = False
    heads: ClassVar[int] = 1
    defaults: ClassVar[Mapping[str, Any]] = {
        "policies": {"hidden_sizes": [128, 128], "activation": "relu", "layer_norm": True}
    }
    name: str = "pqn"
    learning_rate: ScheduleField = Schedule(start=2.5e-4)
    """Adam's step size."""
    exploration: ExplorationField = EpsilonGreedy()
    """Exploration: `epsilon_greedy`, `boltzmann` or `parameter_noise`."""
    td_lambda: float = Field(0.65, ge=0, le=1)
    """λ of the targets: 0 bootstraps after each step, 1 at the end of the fragment alone."""
    epochs: int = Field(2, ge=1)
    """Passes over each update's batch."""
    max_grad_norm: float = Field(10.0, gt=0)
    """Maximum norm of the gradients."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """Adam's ε."""
