"""The configurations of algorithms that learn from recorded experience: behavioral cloning, IQL, CQL, TD3+BC."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from stagecoach.shared.config.algorithms.base import BatchOfUpdate
from stagecoach.shared.config.algorithms.off_policy import LARGE_NETWORK, OffPolicyConfig, SoftConfig, TD3Config
from stagecoach.shared.config.algorithms.replay_buffer import ReplayBufferField, UniformReplay
from stagecoach.shared.config.schema.section import Schedule, ScheduleField


class BCConfig(BatchOfUpdate):
    """Behavioral cloning: the policy learns to do what recorded experience does, by maximum likelihood."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.bc:BC"
    name: str = "bc"
    learning_rate: ScheduleField = Schedule(start=1e-3)
    epochs: int = Field(1, ge=1)
    """Passes over each update's batch; the dataset itself is gone through again and again."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus, against a policy that is surer than its data."""
    max_grad_norm: float = Field(0.5, gt=0)
    """Gradients are scaled down to this norm."""
    adam_epsilon: float = Field(1e-8, gt=0)
    """Adam's ε; 1e-8 as in its paper."""

    def network(self) -> dict[str, Any]:
        """Its critic learns nothing."""
        return {"without_value": True}


class IQLConfig(OffPolicyConfig):
    """Implicit Q-learning (Kostrikov et al. 2022): learns from data without asking for actions that are not in them."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.iql:IQL"
    defaults: ClassVar[Mapping[str, Any]] = {"policies": LARGE_NETWORK, "rollout": {"max_policy_lag": 1}}
    name: str = "iql"
    replay_buffer: ReplayBufferField = UniformReplay(capacity=1_000_000)
    """What is learned from; a million transitions are a whole dataset of the usual size."""
    expectile: float = Field(0.7, ge=0.5, lt=1)
    """τ of the value's regression: at 0.5 it is the mean over the data's actions, toward 1 their best."""
    inverse_temperature: float = Field(3.0, ge=0)
    """β: how much better actions count more in the policy's regression; 0 is behavioral cloning."""
    largest_weight: float = Field(100.0, gt=0)
    """Bound of an action's weight, exp(β · advantage)."""
    target_rate: float = Field(0.005, gt=0, le=1)
    """How far the target critics move toward the critics with each gradient step."""
    minibatch_size: int = Field(256, ge=1)
    gradient_steps_per_env_step: float = Field(0.1, gt=0, le=1000)
    """Gradient steps for each env step read. With minibatches of 256, 0.1 uses a transition some 25 times an epoch."""


class CQLConfig(SoftConfig):
    """Conservative Q-learning (Kumar et al. 2020): soft actor-critic that learns from data. It believes in no action
    that the data do not have. For boxes with bounds, or one discrete choice."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.cql:CQL"
    defaults: ClassVar[Mapping[str, Any]] = {"policies": LARGE_NETWORK, "rollout": {"max_policy_lag": 1}}
    name: str = "cql"
    conservatism: float = Field(5.0, gt=0)
    """Weight of the critics' penalty (the paper's α; 5 or 10 there for boxes, 0.5 to 4 for choices); with `largest_gap`
    only where it begins. It goes with how much single actions change the returns: where they are small, less."""
    largest_gap: float | None = None
    """Learn the weight, such that on average the critics value what could be done by this much more than what the data
    did (the paper's τ; 5 or 10 there): more weight above it, less below. Null: the weight stays."""
    considered_actions: int = Field(10, ge=1)
    """Actions of boxes that are drawn for the penalty from each of three sources: uniformly, from the policy at the
    observation, and at the next one. The critics judge three times as many for each transition: the cost of CQL."""
    value_entropy: bool = False
    """Whether the critics' targets count the policy's entropy, as SAC's do. The authors' code leaves it out."""
    cloning_steps: int = Field(0, ge=0)
    """Gradient steps at the beginning in which the policy only does what the data do, and the critics learn."""
    gradient_steps_per_env_step: float = Field(0.1, gt=0, le=1000)
    """Gradient steps for each env step read. With minibatches of 256, 0.1 uses a transition some 25 times an epoch."""


class TD3BCConfig(TD3Config):
    """TD3+BC (Fujimoto and Gu 2021): TD3 whose policy also does what the data do. For boxes with bounds."""

    learner: ClassVar[str] = "stagecoach.trainer_node.learning.algorithms.td3:TD3BC"
    defaults: ClassVar[Mapping[str, Any]] = {"policies": LARGE_NETWORK, "rollout": {"max_policy_lag": 1}}
    name: str = "td3_bc"
    value_weight: float = Field(2.5, ge=0)
    """α: how much the critics count against cloning, in units of the mean size of their values; 0 clones alone."""
    gradient_steps_per_env_step: float = Field(0.1, gt=0, le=1000)
    """Gradient steps for each env step read. With minibatches of 256, 0.1 uses a transition some 25 times an epoch."""
