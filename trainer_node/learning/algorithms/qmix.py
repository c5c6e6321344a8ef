"""Q-learning of a team's value from its agents' values: VDN (Sunehag et al. 2018) and QMIX (Rashid et al. 2018).

All agents of a policy share its Q-network and act by it alone. The team's value is learned from joint transitions:
those of one environment at one step.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stagecoach.shared.config.algorithms.q_learning import QMIXConfig, VDNConfig
from stagecoach.shared.config.sections import PolicyConfig
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import SpaceSpec
from stagecoach.shared.policies.critic import EachAgent, EnvironmentState
from stagecoach.shared.policies.encoders import ObservationNormalizer, unrounded
from stagecoach.shared.policies.policy import copy_sharing_buffers
from stagecoach.shared.policies.q_network import QNetwork
from stagecoach.shared.policies.registry import borrowed_random_state
from stagecoach.trainer_node.learning.algorithms.dqn import DQN, Noise, of_actions
from stagecoach.trainer_node.learning.algorithms.off_policy import Lesson, Minibatch
from stagecoach.trainer_node.learning.building_blocks.interface import Setting, update_seed
from stagecoach.trainer_node.learning.building_blocks.optimization import Adam, soft_update
from stagecoach.trainer_node.learning.replay_buffers.uniform import TeamReplayBuffer


class VDN(DQN):
    _config: VDNConfig

    def __init__(self, policy: QNetwork, config: VDNConfig, setting: Setting) -> None:
        super().__init__(policy, config, setting)
        size = (policy.spaces, setting.fragment_steps, setting.slots, config.replay_buffer.capacity)
        self.replay_buffer = TeamReplayBuffer(*size, agents=setting.agents)

    @property
    def minibatch_rows(self) -> int:
        return self._config.minibatch_size * self._setting.agents

    def rows(self, batch: Minibatch) -> slice:
        ours, agents = self.shard.rows(len(batch) // self._setting.agents), self._setting.agents
        return slice(ours.start * agents, ours.stop * agents)

    def mixed(self, values: Tensor, observations: Mapping[str, Tensor], there: Tensor, *, target: bool) -> Tensor:
        """Returns the team's value `[B]` from the agents' `[B, A]` (0 if absent) and observations `[B · A, …]`."""
        return values.sum(dim=1)

    def loss(self, batch: Minibatch, noise: tuple[Noise, Noise, Noise] = (None, None, None)) -> tuple[Tensor, Lesson]:
        """Returns the scalar loss of B · A rows, and its metrics: y = r + γ Q_target(s', best action of each continuing
        agent), r mean or sum of the present agents' rewards."""
        (action,), shape = batch.actions.values(), (-1, self._setting.agents)
        there, discount = batch.weight.reshape(shape), (batch.discount * batch.weight).reshape(shape)
        values = of_actions(self.policy.outputs(batch.observations), action).reshape(shape) * there
        predicted = self.mixed(values, batch.observations, there, target=False)
        with torch.no_grad():
            goes_on = (discount > 0).to(there.dtype)
            best = self.bootstrap(batch, None, None).reshape(shape) * goes_on
            after = self.mixed(best, batch.next_observations, goes_on, target=True)
            reward = (batch.reward.reshape(shape) * there).sum(dim=1)
            if self._config.team_reward == "mean":
                reward = reward / there.sum(dim=1)
            expected = torch.addcmul(reward, discount.amax(dim=1), after)
        loss, wrong = self.error(predicted, expected), expected - predicted.detach()
        metrics = {"train/td_error": wrong.abs().mean(), "train/q_value": predicted.detach().mean()}
        return loss, Lesson(metrics | {"train/loss": loss.detach()}, wrong)


class QMIX(VDN):
    _config: QMIXConfig

    def __init__(self, policy: QNetwork, config: QMIXConfig, setting: Setting) -> None:
        super().__init__(policy, config, setting)
        with borrowed_random_state(update_seed(setting.seed, 0)):
            made = Mixer(policy.spaces.observation, policy.config, setting.agents, config.mixing_units)
        self.mixer = made.to(setting.device)
        self.target_mixer = copy_sharing_buffers(self.mixer).requires_grad_(False)
        learned = [item for item in (*policy.parameters(), *self.mixer.parameters()) if item.requires_grad]
        self._optimizer = Adam(learned, config.adam_epsilon, config.weight_decay)
        self._loss = self.compiled(self.loss, self._optimizer)
        self.parts |= {"optimizer/": self._optimizer, "mixer/": self.mixer, "target_mixer/": self.target_mixer}
        self.beside_policy["mixer"] = "mixer/"

    def mixed(self, values: Tensor, observations: Mapping[str, Tensor], there: Tensor, *, target: bool) -> Tensor:
        mixer = self.target_mixer if target else self.mixer
        found: Tensor = mixer(values, observations, there, self.policy.normalizer)
        return found

    def learn(self, batch: Minibatch, counters: Counters, generator: torch.Generator) -> Lesson:
        lesson = super().learn(batch, counters, generator)
        if (self.done + 1) % self._config.target_update_steps == 0:
            soft_update(self.target_mixer, self.mixer, self._config.tau)
        return lesson


class Mixer(nn.Module):
    """Two layers with non-negative weights, so that an agent's best action is the team's best as well; hypernetworks
    compute the weights from the environment's state (eq. 4, 5 and figure 2), or from all observations."""

    def __init__(self, observation: SpaceSpec, config: PolicyConfig, agents: int, units: int) -> None:
        super().__init__()
        self._shape = agents, units
        state = observation.state
        self.state = EachAgent(observation, config, agents) if state is None else EnvironmentState(state, config)
        size = self.state.features
        self.first, self.first_bias = nn.Linear(size, agents * units), nn.Linear(size, units)
        self.second = nn.Linear(size, units)
        self.second_bias = nn.Sequential(nn.Linear(size, units), nn.ReLU(), nn.Linear(units, 1))

    def forward(
        self, values: Tensor, observations: Mapping[str, Tensor], there: Tensor,
        normalizer: ObservationNormalizer | None,
    ) -> Tensor:  # fmt: skip
        state: Any = self.state(observations, there, normalizer)
        weights = self.first(state).abs().unflatten(1, self._shape)
        hidden = nn.functional.elu((values.unsqueeze(1) @ weights).squeeze(1) + self.first_bias(state))
        mixed = (hidden * self.second(state).abs()).sum(dim=1) + self.second_bias(state).squeeze(1)
        return unrounded(mixed)
