"""Base of the algorithms that learn each update's batch: batch, gradient steps, metrics.

Two objectives (a2c.py, ppo.py) and two advantage estimates (building_blocks/advantages.py) make A2C, IMPALA, PPO and
APPO. PQN learns values alone; BC's batch has no advantages.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from stagecoach.shared.config.algorithms.base import BatchOfUpdate
from stagecoach.shared.config.algorithms.offline import BCConfig
from stagecoach.shared.config.algorithms.on_policy import A2CConfig, OnPolicyConfig, PPOConfig, VTraceConfig
from stagecoach.shared.config.algorithms.q_learning import PQNConfig
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import Array
from stagecoach.shared.policies.actor_critic import ActorCritic, Heads
from stagecoach.shared.policies.policy import Policy
from stagecoach.trainer_node.learning.building_blocks.advantages import Trajectories, VTrace, gae, vtrace
from stagecoach.trainer_node.learning.building_blocks.batch import (
    Batch,
    ForwardPass,
    forward_pass,
    log_probs,
    sequences,
)
from stagecoach.trainer_node.learning.building_blocks.cloning import Cloning
from stagecoach.trainer_node.learning.building_blocks.compilation import compiled, equal_parts
from stagecoach.trainer_node.learning.building_blocks.interface import (
    Experience,
    PolicyLearner,
    Setting,
    Terms,
    update_seed,
)
from stagecoach.trainer_node.learning.building_blocks.optimization import Adam, autocast, gradient_step
from stagecoach.trainer_node.learning.building_blocks.team import with_team
from stagecoach.trainer_node.learning.reward_signals.reward_signals import RewardSignals


class BatchLearner(PolicyLearner):
    """Learns one policy: a batch from the fragments, gradient steps on it, then the normalizer."""

    def __init__(self, policy: Policy, config: OnPolicyConfig | BCConfig | PQNConfig, setting: Setting) -> None:
        super().__init__(policy, config, setting)
        self._optimizer = Adam(self.policy.parameters(), config.adam_epsilon, config.weight_decay)
        self.parts[""] = self._optimizer
        count = setting.transitions
        sizes = equal_parts(count, config.minibatch_size) if isinstance(config, BatchOfUpdate) else {count}
        self._loss = compiled(self.loss, setting, sizes, self._optimizer)

    def batch(self, tensors: Mapping[str, Tensor]) -> Any:
        """Returns the batch of the fragments' columns, side by side; no gradients are recorded."""
        raise NotImplementedError

    def loss(self, batch: Any, *arguments: Any) -> Terms:
        """Returns the scalar loss of a minibatch and its terms, this rank's part of each."""
        raise NotImplementedError

    def _begin(self, experience: Sequence[Experience], tensors: Mapping[str, Tensor], counters: Counters) -> None:
        """Prepares an update."""

    def _schedules(self, counters: Counters) -> dict[str, float]:
        return {"train/learning_rate": self._config.learning_rate.value(counters)}

    def _loss_arguments(self, counters: Counters) -> tuple[Any, ...]:
        """Returns the arguments of `loss` besides the batch."""
        return ()

    def _learn(self, batch: Any, counters: Counters) -> list[dict[str, float]]:
        """Performs all gradient steps of one update on a non-empty batch; returns the terms of each."""
        return self._epochs(batch, counters, *self._loss_arguments(counters))

    def _end(self, batch: Any, counters: Counters) -> dict[str, float]:
        return {}

    def update(self, experience: Sequence[Experience], counters: Counters) -> dict[str, float]:
        """Learns from K fragments of equal T; returns the metrics. The normalizer is updated afterwards, so that the
        batch is learned with the statistics that it was acted with."""
        tensors = self._tensors(experience)
        self._begin(experience, tensors, counters)
        with autocast(self._setting.device, self._setting.precision):
            with torch.no_grad():
                batch = self.batch(tensors)
            if self.watch is not None and len(batch):
                self.watch(batch, self._loss_arguments(counters))
            history = self._learn(batch, counters) if len(batch) else []
        metrics = {name: float(np.mean([item[name] for item in history])) for name in (history[0] if history else {})}
        metrics |= self._schedules(counters) | {"train/gradient_steps": len(history)}
        if len(batch):
            metrics |= self._end(batch, counters)
        self._update_normalizer(tensors)
        return metrics

    def observe(self, experience: Sequence[Experience]) -> None:
        self._update_normalizer(self._tensors(experience))

    def _epochs(self, batch: Any, counters: Counters, *arguments: Any) -> list[dict[str, float]]:
        """Runs epochs of shuffled minibatches until `_stops`; `arguments` are for the loss."""
        config, history, norms = self._config, list[dict[str, Tensor]](), list[Tensor]()
        learning_rate = config.learning_rate.value(counters)
        generator = torch.Generator().manual_seed(update_seed(self._setting.seed, counters.updates))
        for _ in range(config.epochs):
            order = torch.randperm(len(batch), generator=generator).to(self._setting.device)
            for minibatch in self._minibatches(batch, order):
                loss, terms = self._forward(minibatch, *arguments)
                if self._stops(terms):
                    return self._rows(history or [terms], norms)
                norms.append(self._gradient_step(loss, learning_rate))
                history.append(terms)
        return self._rows(history, norms)

    def _minibatches(self, batch: Any, order: Tensor) -> Iterable[Any]:
        found: Iterable[Any] = batch.shuffled(order, batch.minibatches(self._config.minibatch_size))
        return found

    def _stops(self, terms: Mapping[str, Tensor]) -> bool:
        """Decides from a minibatch's terms, before its gradient step, if the epochs end."""
        return False

    def _forward(self, *arguments: Any) -> Terms:
        return self._loss(*arguments)

    def _gradient_step(self, loss: Tensor, learning_rate: float) -> Tensor:
        bound, total = self._config.max_grad_norm, self.shard.total
        return gradient_step(loss, self._optimizer, learning_rate, bound, total, all_inputs=True)

    def _rows(self, history: Sequence[Mapping[str, Tensor]], norms: Sequence[Tensor]) -> list[dict[str, float]]:
        """Returns a row for each gradient step (at least one): terms of the whole minibatch, and the gradient norm.
        Called once per update, because reading a tensor waits for the device."""
        table = self.shard.total(torch.stack([torch.stack(list(terms.values())) for terms in history]))
        rows: list[dict[str, float]] = [dict(zip(history[0], values, strict=True)) for values in table.tolist()]
        for row, value in zip(rows, torch.stack(list(norms)).tolist() if norms else ()):
            row["train/grad_norm"] = value
        return rows


class OnPolicy(BatchLearner):
    """Learns an actor-critic from advantages, with reward signals and cloning."""

    policy: ActorCritic
    """Or a `RecurrentActorCritic`, whose batches are `Sequences`."""
    _config: OnPolicyConfig

    def __init__(self, policy: ActorCritic, config: OnPolicyConfig, setting: Setting) -> None:
        super().__init__(policy, config, setting)
        self.signals = RewardSignals(self.policy, config.reward_signals, config, setting)
        self.parts["signals/"] = self.signals
        self.cloning = Cloning(config.behavioral_cloning, policy, setting)
        self._entropy_coefficient = config.entropy_coefficient.start
        self._advantages: tuple[Tensor, Tensor] | None = None
        """Advantages `[T, S]` of the last batch, and its mask."""

    def _tensors(self, experience: Sequence[Experience]) -> dict[str, Tensor]:
        agents, observed = self.policy.agents, self.policy.spaces.observation
        if agents:
            experience = [Experience(item.source, with_team(item.columns, observed, agents)) for item in experience]
        return super()._tensors(experience)

    def _begin(self, experience: Sequence[Experience], tensors: Mapping[str, Tensor], counters: Counters) -> None:
        self._entropy_coefficient = self._config.entropy_coefficient.value(counters)
        self.cloning.begin(counters)
        self.signals.observe_batch(experience, tensors)

    def _schedules(self, counters: Counters) -> dict[str, float]:
        return super()._schedules(counters) | self.cloning.metrics

    def _end(self, batch: Batch, counters: Counters) -> dict[str, float]:
        target, value = batch.counted(batch.target), batch.counted(batch.value)
        if (scale := self.policy.value_scale) is not None:  # the value was predicted in the units before this update
            mean, deviation = self._units
            value = scale.normalized(value * deviation + mean)
        spread = target.var(correction=0) if len(target) else torch.zeros(())
        unexplained = (target - value).var(correction=0) / spread if spread > 0 else torch.nan
        explained = {"train/explained_variance": 1.0 - float(unexplained)}
        return explained | batch.metrics | self.signals.learn(counters)

    @property
    def advantages(self) -> Array | None:
        """Advantages `[T, S]` of the last batch, by which levels are scored; zero where no agent acted."""
        if self._advantages is None:
            return None
        advantage, mask = self._advantages
        return (advantage * mask).cpu().numpy()

    def observe(self, experience: Sequence[Experience]) -> None:
        self.signals.observe(self._tensors(experience))
        super().observe(experience)

    def _made(
        self, tensors: Mapping[str, Tensor], value: Tensor, advantage: Tensor, target: Tensor, anchor: Tensor | None
    ) -> Batch:
        """Builds the batch of the counted transitions."""
        spaces = self.policy.spaces
        observations = {name: tensors[name] for name in self.policy.read_columns}
        actions = {name: tensors[name] for name in spaces.action.column_names("action")}
        start = self._start_log_prob(tensors)
        self._advantages = advantage, tensors["mask"]
        if (scale := self.policy.value_scale) is not None:
            self._units = scale.moments(value)
            scale.update(target[tensors["mask"]])
            target = scale.normalized(target)
        batch = Batch(observations, actions, tensors["log_prob"], value, advantage, target, anchor, start)
        return sequences(batch, tensors) if self.policy.state_size else batch.rows(tensors["mask"])

    def _start_log_prob(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Returns `Batch.start_log_prob` as `[T, S]` if the objective needs it."""
        return None

    def batch(self, tensors: Mapping[str, Tensor]) -> Batch:
        """Returns the batch with generalized advantage estimates; V-trace algorithms override it."""
        found, config = forward_pass(self.policy, tensors, with_params=False), cast(PPOConfig | A2CConfig, self._config)
        estimate = partial(gae, gae_lambda=config.gae_lambda)
        advantage, target = estimate(self._trajectories(tensors, found))
        return self._made(
            tensors, found.value, self.signals.join(advantage, estimate), target, self._anchor_params(tensors)
        )

    def _anchor_params(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """Returns `Batch.anchor_params` as `[T, S, P]` if the objective needs them."""
        return None

    def _by_vtrace(
        self, tensors: Mapping[str, Tensor], policy: Heads, config: VTraceConfig
    ) -> tuple[ForwardPass, Tensor, VTrace]:
        """Returns the outputs of `policy`, its log-probabilities `[T, S]`, and V-trace with all signals' advantages."""
        found = forward_pass(policy, tensors, with_params=True)
        log_prob = log_probs(policy, tensors, found.params)

        def traced(of: Trajectories) -> VTrace:
            return vtrace(of, log_prob - tensors["log_prob"], config.vtrace_lambda, config.rho_bar, config.c_bar)

        trace = traced(self._trajectories(tensors, found))

        def estimate(other: Trajectories) -> tuple[Tensor, Tensor]:
            its = traced(other)
            return its.advantage, its.target

        return found, log_prob, trace._replace(advantage=self.signals.join(trace.advantage, estimate))

    def _trajectories(self, tensors: Mapping[str, Tensor], found: ForwardPass) -> Trajectories:
        columns = {name: tensors[name] for name in ("reward", "terminated", "truncated", "mask")}
        values: dict[str, Tensor] = {name: getattr(found, name) for name in ("value", "bootstrap_value", "final_value")}
        if (scale := self.policy.value_scale) is not None:
            values = {name: scale.restored(value) for name, value in values.items()}
        index = tensors["final_index"].to(torch.int64)
        return Trajectories(**columns, **values, final_index=index, gamma=self._config.gamma)

    def _evaluated(self, batch: Batch, *, normalize: bool) -> tuple[Batch, Tensor, Tensor, int]:
        """Returns this rank's rows of a minibatch, the policy's parameters and values for them, and the number of all
        rows. Advantages are normalized over the whole minibatch of all ranks."""
        count = len(batch.counted(batch.log_prob))
        batch = batch.normalized() if normalize else batch
        part = batch.take(self.shard.rows(len(batch)))
        return part.flat(), *part.outputs(self.policy), count

    def _total_loss(self, policy_loss: Tensor, value_loss: Tensor, entropy: Tensor) -> Terms:
        weighted = self._config.value_coefficient * value_loss
        loss = policy_loss + weighted - self._entropy_coefficient * entropy
        terms = {"train/loss": loss, "train/policy_loss": policy_loss}
        terms |= {"train/value_loss": value_loss, "train/entropy": entropy}
        return loss, {name: term.detach() for name, term in terms.items()}

    def _forward(self, *arguments: Any) -> Terms:
        return self.cloning.beside(self.shard, super()._forward(*arguments))
