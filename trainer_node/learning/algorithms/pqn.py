"""Parallelized Q-network (Gallici et al. 2024): Q(λ) on each update's batch, without replay buffer or target network.

What keeps it stable is layer normalization in the network, and many environments.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from stagecoach.shared.config.algorithms.q_learning import PQNConfig
from stagecoach.shared.policies.q_network import QNetwork
from stagecoach.trainer_node.learning.algorithms.dqn import of_actions
from stagecoach.trainer_node.learning.algorithms.on_policy import BatchLearner
from stagecoach.trainer_node.learning.building_blocks.advantages import Trajectories, gae
from stagecoach.trainer_node.learning.building_blocks.batch import Batch, in_chunks
from stagecoach.trainer_node.learning.building_blocks.interface import Terms


class PQN(BatchLearner):
    policy: QNetwork
    _config: PQNConfig

    def batch(self, tensors: Mapping[str, Tensor]) -> Batch:
        """Returns the batch with the targets of Peng's Q(λ), section 3.3: the λ-returns of V = max Q."""
        spaces, shape = self.policy.spaces, tensors["reward"].shape
        names = spaces.observation.column_names("obs")

        def best(observations: dict[str, Tensor]) -> Tensor:
            return in_chunks(lambda rows: self.policy.action_parameters(rows).amax(dim=1), observations)

        bootstrap, final = (best({name: tensors[end + name] for name in names}) for end in ("bootstrap_", "final_"))
        trajectories = Trajectories(
            **{name: tensors[name] for name in ("reward", "terminated", "truncated", "mask")},
            value=best({name: tensors[name].flatten(0, 1) for name in names}).reshape(shape), bootstrap_value=bootstrap,
            final_value=final, final_index=tensors["final_index"].to(torch.int64), gamma=self._config.gamma,
        )  # fmt: skip
        advantage, target = gae(trajectories, self._config.td_lambda)
        actions = {name: tensors[name] for name in spaces.action.column_names("action")}
        observations = {name: tensors[name] for name in names}
        batch = Batch(observations, actions, tensors["log_prob"], trajectories.value, advantage, target)
        return batch.rows(tensors["mask"])

    def loss(self, batch: Batch) -> Terms:
        """Returns half the mean squared error of the values of the actions taken, this rank's part, and its terms."""
        mean, rows = self.shard.mean, len(batch)
        batch = batch.take(self.shard.rows(rows))
        (action,) = batch.actions.values()
        value = of_actions(self.policy.outputs(batch.observations), action).squeeze(1)
        errors = value - batch.target
        loss = 0.5 * mean(errors.square(), rows)
        terms = {"train/loss": loss, "train/td_error": mean(errors.abs(), rows), "train/q_value": mean(value, rows)}
        return loss, {name: term.detach() for name, term in terms.items()}
