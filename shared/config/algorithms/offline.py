"""Sections of algorithms for recorded experience: behavioral cloning, IQL, CQL, TD3+BC."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from stagecoach.shared.config.algorithms.base import BatchOfUpdate
from stagecoach.shared.config.algorithms.off_policy import LARGE_NETWORK, OffPolicyConfig, SoftConfig, TD3Config
from stagecoach.shared.config.algorithms.replay_buffer import ReplayBufferField, UniformReplay
from stagecoach.shared.config.schema.section import Schedule, ScheduleField, Section


class FromData(Section):
    """Fields of algorithms that learn from a dataset by gradient steps."""

    defaults: ClassVar[Mapping[str, Any]] = {"policies": LARGE_NETWORK, "rollout": {"max_policy_lag": 1}}
    gradient_steps_per_env_step: float = Field(0.1, gt=0, le=1000)
    """Gradient steps for each env step read. With minibatches of 256, 0.1 uses a transition some 25 times an epoch."""


class BCConfig(BatchOfUpdate):
    """Behavioral cloning: maximizes the likelihood of the recorded actions."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.bc:BC"
    name: str = "bc"
    learning_rate: ScheduleField = Schedule(start=1e-3)
    epochs: int = Field(1, ge=1)
    """Passes over each update's batch; the dataset is read repeatedly."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus, which keeps the policy from being overconfident."""
    max_grad_norm: float = Field(0.5, gt=0)
    """Maximum norm of the gradients."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """Adam's ε; 1e-8 as in its paper."""

    def network(self) -> dict[str, Any]:
        """Returns arguments for a policy without a value function."""
        return {"without_value": True}


class IQLConfig(FromData, OffPolicyConfig):
    """Implicit Q-learning (Kostrikov et al. 2022): learns from data without evaluating actions outside of it."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.iql:IQL"
    name: str = "iql"
    replay_buffer: ReplayBufferField = UniformReplay(capacity=1_000_000)
    """Replay buffer; a million transitions hold a dataset of the usual size."""
    expectile: float = Field(0.7, ge=0.5, lt=1)
    """τ of the value's regression: at 0.5 it is the mean over the data's actions, toward 1 their best."""
    inverse_temperature: float = Field(3.0, ge=0)
    """β: weight of the advantage in the policy's regression; 0 is behavioral cloning."""
    largest_weight: float = Field(100.0, gt=0)
    """Bound of an action's weight, exp(β · advantage)."""
    target_rate: float = Field(0.005, gt=0, le=1)
    """Interpolation factor of the target critics in each gradient step."""
    minibatch_size: int = Field(256, ge=1)


class CQLConfig(FromData, SoftConfig):
    """Conservative Q-learning (Kumar et al. 2020): soft actor-critic from data, with a penalty on the values of actions
    outside of it. For bounded boxes, or one discrete action."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.cql:CQL"
    name: str = "cql"
    conservatism: float = Field(5.0, gt=0)
    """Weight of the critics' penalty (the paper's α: 5 or 10 for boxes, 0.5 to 4 for discrete actions); its initial
    value with `largest_gap`. Use less where single actions change returns little."""
    largest_gap: float | None = None
    """Learns the weight so that the critics value policy actions at most this much above data actions (the paper's τ: 5
    or 10). Null: the weight is constant."""
    considered_actions: int = Field(10, ge=1)
    """Actions per source for the penalty of a box: uniform, policy at the observation, policy at the next one. Critics
    evaluate three times as many per transition: the cost of CQL."""
    value_entropy: bool = False
    """Adds the policy's entropy to the critics' targets, as SAC does. The authors' code leaves it out."""
    cloning_steps: int = Field(0, ge=0)
    """Initial gradient steps in which the policy only clones the data while the critics learn."""


class TD3BCConfig(FromData, TD3Config):
    """TD3+BC (Fujimoto and Gu 2021): TD3 whose policy also clones the data. For bounded boxes."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.td3:TD3BC"
    name: str = "td3_bc"
    value_weight: float = Field(2.5, ge=0)
    """α: weight of the critics relative to cloning, in units of the mean absolute value; 0 only clones."""
