"""What algorithms share that learn an actor-critic from the batch of each update: batch, gradient step, figures.

There are two objectives (policy_gradient.py, clipped.py) and two ways to work out advantages (gae.py, vtrace.py); A2C,
IMPALA, PPO and APPO are the four pairs. Tensors and config only; everything follows from state, fragments and counters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.algorithm_configs.on_policy import OnPolicyConfig, VTraceConfig
from shared.policies.actor_critic import ActorCritic, Heads
from shared.spaces import Array, Columns
from shared.steps import Counters
from trainer_node.algorithms.adam import Adam
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.batch import Batch
from trainer_node.algorithms.cloning import make_cloning
from trainer_node.algorithms.computing import computing, to_device
from trainer_node.algorithms.descent import descend
from trainer_node.algorithms.experience import Experience, side_by_side
from trainer_node.algorithms.gae import Estimate, by_gae
from trainer_node.algorithms.named_arrays import part
from trainer_node.algorithms.outputs import Outputs, log_probs, outputs
from trainer_node.algorithms.sequences import sequences
from trainer_node.algorithms.share import Share, Terms, Whole
from trainer_node.algorithms.vtrace import VTrace, vtrace
from trainer_node.reward_signals.signals import RewardSignals

_SIGNALS = "signals/"


class OnPolicy:
    """Learns one policy: a batch from the fragments, gradient steps on it, then the normaliser.

    A subclass makes the batch, and learns from it in one or more gradient steps.
    """

    def __init__(self, policy: ActorCritic, config: OnPolicyConfig, setting: Setting) -> None:
        self.policy = policy.to(setting.device)
        """Or a `RecurrentActorCritic`, whose batches are `Sequences`."""
        self._shared = config
        self._device = setting.device
        self._seed = setting.seed
        self._precision = setting.precision
        self.share: Share = Whole()
        """What of each minibatch is learnt from here; the rest by the other ranks."""
        self._optimiser = Adam(self.policy.parameters(), config.adam_epsilon)
        asked = config.reward_signals
        self._signals = None if asked is None else RewardSignals(self.policy, asked, config, setting)
        """Beside the environment's rewards."""
        self._cloning = make_cloning(config.behavioural_cloning, policy, setting)

    def _begin(self, counters: Counters) -> None:
        """What comes before each update."""

    def _batch(self, tensors: Mapping[str, Tensor]) -> Batch:
        """The batch from the fragments' columns, side by side; no gradients are recorded."""
        raise NotImplementedError

    def _learn(self, batch: Batch, counters: Counters) -> list[dict[str, float]]:
        """All gradient steps of one update on a batch that is not empty; answers the terms of each."""
        raise NotImplementedError

    def _schedules(self, counters: Counters) -> dict[str, float]:
        """What goes by a schedule, as metrics."""
        return {"train/learning_rate": self._shared.learning_rate.value(counters)}

    def update(self, experience: Sequence[Experience], counters: Counters) -> dict[str, float]:
        """One update from K fragments of equal T; answers the metrics.

        The normaliser takes these observations in afterwards, so that the batch is learnt with the statistics that it
        was acted with.
        """
        self._begin(counters)
        cloning = {} if self._cloning is None else self._cloning.begin(counters)
        tensors = {name: self._tensor(array) for name, array in side_by_side(experience).items()}
        if self._signals is not None:
            self._signals.look(experience, tensors)
        with computing(self._device, self._precision):
            with torch.no_grad():
                batch = self._batch(tensors)
            history = self._learn(batch, counters) if len(batch) else []
        metrics = {name: float(np.mean([item[name] for item in history])) for name in (history[0] if history else {})}
        metrics |= self._schedules(counters) | cloning | {"train/gradient_steps": len(history)}
        if len(batch):
            target, value = batch.counted(batch.target), batch.counted(batch.value)
            spread = target.var()
            unexplained = (target - value).var() / spread if len(target) > 1 and spread > 0 else torch.nan
            metrics |= {"train/explained_variance": 1.0 - float(unexplained), **batch.figures}
            if self._signals is not None:
                metrics |= self._signals.learn(counters)
        self._normalise(tensors)
        return metrics

    def observe(self, experience: Sequence[Experience]) -> None:
        """Takes the observations into the normaliser and the signals' statistics: all there is to do in heat-up."""
        tensors = {name: self._tensor(array) for name, array in side_by_side(experience).items()}
        if self._signals is not None:
            self._signals.observe(tensors)
        self._normalise(tensors)

    def _normalise(self, tensors: Mapping[str, Tensor]) -> None:
        if self.policy.normaliser is not None:
            names = self.policy.spaces.observation.column_names("obs")
            self.policy.normaliser.update({name: tensors[name][tensors["mask"]] for name in names})

    def _made(
        self,
        tensors: Mapping[str, Tensor],
        value: Tensor,
        advantage: Tensor,
        target: Tensor,
        anchor_params: Tensor | None = None,
    ) -> Batch:
        """The transitions that count of columns `[T, S, …]`: as rows, or as sequences for a policy with a core."""
        spaces = self.policy.spaces
        observations = {name: tensors[name] for name in spaces.observation.column_names("obs")}
        actions = {name: tensors[name] for name in spaces.action.column_names("action")}
        start = self._start_log_prob(tensors)
        batch = Batch(observations, actions, tensors["log_prob"], value, advantage, target, anchor_params, start)
        if self.policy.state_size:
            return sequences(batch, tensors)
        keep = tensors["mask"].flatten()
        return batch.each(lambda tensor: tensor.flatten(0, 1)[keep])

    def _start_log_prob(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """`[T, S]`: `Batch.start_log_prob`, where the objective needs it."""
        return None

    def _by_gae(self, tensors: Mapping[str, Tensor], gae_lambda: float) -> Batch:
        """With advantages and targets by generalised advantage estimation."""
        found = outputs(self.policy, tensors, with_params=False)
        estimate = by_gae(gae_lambda)
        advantage, target = estimate(value=found.value, **self._ends(tensors, found), gamma=self._shared.gamma)
        return self._made(tensors, found.value, self._joined(advantage, estimate), target)

    def _by_vtrace(
        self, tensors: Mapping[str, Tensor], policy: Heads, config: VTraceConfig
    ) -> tuple[Outputs, Tensor, VTrace]:
        """The outputs of `policy`, its log-probabilities `[T, S]`, and what V-trace makes of them."""
        found = outputs(policy, tensors, with_params=True)
        assert found.params is not None
        log_prob = log_probs(policy, tensors, found.params)
        log_ratio = log_prob - tensors["log_prob"]
        traced: Callable[..., VTrace] = partial(
            vtrace, log_ratio=log_ratio, vtrace_lambda=config.vtrace_lambda, rho_bar=config.rho_bar, c_bar=config.c_bar
        )
        trace = traced(value=found.value, **self._ends(tensors, found), gamma=self._shared.gamma)

        def estimate(**signal: Any) -> tuple[Tensor, Tensor]:
            """Of another signal, by the same ratios."""
            its = traced(**signal)
            return its.advantage, its.target

        return found, log_prob, trace._replace(advantage=self._joined(trace.advantage, estimate))

    def _joined(self, advantage: Tensor, estimate: Estimate) -> Tensor:
        """`[T, S]`: the advantages of all reward signals together, where `advantage` is that of the environment's."""
        return advantage if self._signals is None else self._signals.join(advantage, estimate)

    def _ends(self, tensors: Mapping[str, Tensor], found: Outputs) -> dict[str, Tensor]:
        """Rewards, and all that says where episodes and fragments end and what comes after is worth."""
        return {name: tensors[name] for name in ("reward", "terminated", "truncated", "mask")} | {
            "bootstrap_value": found.bootstrap_value,
            "final_index": tensors["final_index"].to(torch.int64),
            "final_value": found.final_value,
        }

    def _total_loss(self, policy_loss: Tensor, value_loss: Tensor, entropy: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar loss and its terms."""
        config = self._shared
        loss = policy_loss + config.value_coefficient * value_loss - config.entropy_coefficient * entropy
        return loss, {
            "train/loss": loss.detach(),
            "train/policy_loss": policy_loss.detach(),
            "train/value_loss": value_loss.detach(),
            "train/entropy": entropy.detach(),
        }

    def _forward(self, loss: Callable[..., Terms], *arguments: Any) -> Terms:
        """Of one gradient step: what `loss` answers, and what is cloned beside it."""
        cloning = self._cloning
        if cloning is None:
            return self.share.forward(loss, *arguments)
        return self.share.forward(lambda: cloning.beside(self.share, loss(*arguments)))

    def _descend(self, loss: Tensor, learning_rate: float) -> Tensor:
        """One gradient step; answers the norm of the gradient before it was scaled down."""
        return descend(loss, None, self._optimiser, learning_rate, self._shared.max_grad_norm)

    def _tensor(self, array: Array) -> Tensor:
        return to_device(array, self._device)

    def state(self) -> Columns:
        """The optimiser's state as named arrays, and that of reward signals under `signals/`."""
        signals = {} if self._signals is None else self._signals.state()
        return self._optimiser.state() | {_SIGNALS + name: array for name, array in signals.items()}

    def load_state(self, arrays: Mapping[str, Array]) -> None:
        """The inverse of `state`."""
        self._optimiser.load_state({name: array for name, array in arrays.items() if not name.startswith(_SIGNALS)})
        if self._signals is not None:
            self._signals.load_state(part(arrays, _SIGNALS))
