"""Behavioral cloning: maximum likelihood of the recorded actions (Pomerleau 1991), with an entropy bonus on request.

It ignores rewards and episodes.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from stagecoach.shared.config.algorithms.offline import BCConfig
from stagecoach.shared.policies.actor_critic import ActorCritic
from stagecoach.trainer_node.learning.algorithms.on_policy import BatchLearner
from stagecoach.trainer_node.learning.building_blocks.demonstrations import Pairs
from stagecoach.trainer_node.learning.building_blocks.interface import Terms


class BC(BatchLearner):
    policy: ActorCritic
    _config: BCConfig

    def loss(self, batch: Pairs) -> Terms:
        mean, rows = self.shard.mean, len(batch)
        batch = batch.take(self.shard.rows(rows))
        params, value = self.policy.action_parameters_and_value(batch.observations)
        distribution = self.policy.distribution
        unlikelihood = -mean(distribution.log_prob(params, batch.actions), rows)
        entropy = mean(distribution.entropy(params), rows)
        loss = unlikelihood - self._config.entropy_coefficient * entropy
        with torch.no_grad():
            error = mean(self._error(distribution.mode(params), batch.actions), rows)
        terms = {"train/loss": loss, "train/negative_log_likelihood": unlikelihood}
        terms |= {"train/entropy": entropy, "train/action_error": error}
        metrics = {name: term.detach() for name, term in terms.items()}
        return loss + 0.0 * value.sum(), metrics  # gives the critic an optimizer state too

    def _error(self, chosen: Mapping[str, Tensor], recorded: Mapping[str, Tensor]) -> Tensor:
        """Returns `[B]`: differing choices plus squared differences of boxes, of the most probable action."""
        parts = [
            (chosen[name] - recorded[name]).reshape(-1, leaf.size).square().sum(dim=1)
            if leaf.kind == "box"
            else (chosen[name] != recorded[name]).reshape(-1, leaf.size).sum(dim=1).to(torch.float32)
            for leaf in self.policy.spaces.action.leaves
            for name in [leaf.column("action")]
        ]
        return torch.stack(parts).sum(dim=0)

    def batch(self, tensors: Mapping[str, Tensor]) -> Pairs:
        def flat(names: Sequence[str]) -> dict[str, Tensor]:
            return {name: tensors[name][tensors["mask"]] for name in names}

        spaces = self.policy.spaces
        return Pairs(flat(spaces.observation.column_names("obs")), flat(spaces.action.column_names("action")))

    def _minibatches(self, batch: Pairs, order: Tensor) -> Iterable[Pairs]:
        return (batch.take(rows) for rows in order.tensor_split(-(-len(batch) // self._config.minibatch_size)))
