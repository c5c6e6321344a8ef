"""Behavioural cloning: maximum likelihood of the recorded actions (Pomerleau 1991), with an entropy bonus on request.

Order of the file: loss, update. Rewards and episodes do not matter to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from shared.algorithm_configs.bc import BCConfig
from shared.policies.actor_critic import ActorCritic
from shared.spaces import Array, Columns
from shared.steps import Counters
from trainer_node.algorithms.adam import Adam
from trainer_node.algorithms.algorithm import Setting
from trainer_node.algorithms.compiling import compiled, equal_parts
from trainer_node.algorithms.computing import computing
from trainer_node.algorithms.descent import descend, figures
from trainer_node.algorithms.experience import Experience, side_by_side, update_seed
from trainer_node.algorithms.pairs import Pairs
from trainer_node.algorithms.share import Share, Whole


class BC:
    """Learns one policy."""

    def __init__(self, policy: ActorCritic, config: BCConfig, setting: Setting) -> None:
        self.policy = policy.to(setting.device)
        self._config = config
        self._device = setting.device
        self._seed, self._precision = setting.seed, setting.precision
        self.share: Share = Whole()
        """What of each minibatch is learnt from here; the rest by the other ranks."""
        self._optimiser = Adam(self.policy.parameters(), config.adam_epsilon)
        self._loss = compiled(self.loss, setting, equal_parts(setting.transitions, config.minibatch_size))

    def loss(self, batch: Pairs) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar loss of a minibatch and its terms; of them, what is our share."""
        config, mean, rows = self._config, self.share.mean, len(batch)
        batch = batch.take(self.share.rows(rows))
        params, value = self.policy.action_parameters_and_value(batch.observations)
        distribution = self.policy.distribution
        unlikelihood = -mean(distribution.log_prob(params, batch.actions), rows)
        entropy = mean(distribution.entropy(params), rows)
        loss = unlikelihood - config.entropy_coefficient * entropy
        with torch.no_grad():
            metrics = {
                "train/loss": loss.detach(),
                "train/negative_log_likelihood": unlikelihood.detach(),
                "train/entropy": entropy.detach(),
                "train/action_error": mean(self._error(distribution.mode(params), batch.actions), rows),
            }
        return loss + 0.0 * value.sum(), metrics  # ranks exchange a gradient of every weight, also of the critic's

    def _error(self, chosen: Mapping[str, Tensor], recorded: Mapping[str, Tensor]) -> Tensor:
        """`[B]`: of the most probable action: how many of its choices differ, and squared differences of its boxes."""
        parts = [
            (chosen[name] - recorded[name]).reshape(-1, leaf.size).square().sum(dim=1)
            if leaf.kind == "box"
            else (chosen[name] != recorded[name]).reshape(-1, leaf.size).sum(dim=1).to(torch.float32)
            for leaf in self.policy.spaces.action.leaves
            for name in [leaf.column("action")]
        ]
        return torch.stack(parts).sum(dim=0)

    def update(self, experience: Sequence[Experience], counters: Counters) -> dict[str, float]:
        """One update from K fragments of equal T; answers the metrics."""
        learning_rate = self._config.learning_rate.value(counters)
        columns = side_by_side(experience)
        with computing(self._device, self._precision):
            history = self._epochs(self._batch(columns), learning_rate, counters.updates)
        metrics = {name: float(np.mean([item[name] for item in history])) for name in (history[0] if history else {})}
        self._normalise(columns)
        return metrics | {"train/learning_rate": learning_rate, "train/gradient_steps": len(history)}

    def observe(self, experience: Sequence[Experience]) -> None:
        """Takes the observations into the normaliser: all there is to do in heat-up."""
        self._normalise(side_by_side(experience))

    def _normalise(self, columns: Mapping[str, Array]) -> None:
        if self.policy.normaliser is not None:
            self.policy.normaliser.update(self._batch(columns).observations)

    def _batch(self, columns: Mapping[str, Array]) -> Pairs:
        """The steps that are no padding."""

        def flat(names: Sequence[str]) -> dict[str, Tensor]:
            return {name: torch.from_numpy(columns[name][columns["mask"]]).to(self._device) for name in names}

        spaces = self.policy.spaces
        return Pairs(flat(spaces.observation.column_names("obs")), flat(spaces.action.column_names("action")))

    def _epochs(self, batch: Pairs, learning_rate: float, update: int) -> list[dict[str, float]]:
        """All gradient steps of one update, and the terms of each."""
        generator = torch.Generator().manual_seed(update_seed(self._seed, update))
        minibatches = -(-len(batch) // self._config.minibatch_size)
        history: list[dict[str, Tensor]] = []
        norms: list[Tensor] = []
        for _ in range(self._config.epochs if len(batch) else 0):
            order = torch.randperm(len(batch), generator=generator).to(self._device)
            for rows in order.tensor_split(minibatches):
                loss, terms = self.share.forward(self._loss, batch.take(rows))
                norms.append(descend(loss, None, self._optimiser, learning_rate, self._config.max_grad_norm))
                history.append(terms)
        return figures(self.share, history, {"train/grad_norm": norms}) if history else []

    def state(self) -> Columns:
        """The optimiser's state as named arrays."""
        return self._optimiser.state()

    def load_state(self, arrays: Columns) -> None:
        """The inverse of `state`."""
        self._optimiser.load_state(arrays)
