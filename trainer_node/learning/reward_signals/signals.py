"""The reward signals (docs/guides/reward-signals.md).

Curiosity pays for what is wrong in predicting where a step led, by random network distillation (RND, Burda et al. 2019)
or in learned features (ICM, Pathak et al. 2017); GAIL (Ho and Ermon 2016, with the gradient penalty of Gulrajani et al.
2017) pays for what looks like demonstrations.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.config.algorithms.reward_signals import GAILConfig, ICMConfig, RNDConfig
from stagecoach.shared.policies.encoders import Encoder
from stagecoach.shared.policies.policy import Policy
from stagecoach.trainer_node.learning.building_blocks.demonstrations import Demonstrations
from stagecoach.trainer_node.learning.reward_signals.base import ActionEncoding, RewardSignal, Rows, embedding, mlp


class RND(RewardSignal):
    def __init__(self, policy: Policy, config: RNDConfig) -> None:
        super().__init__(policy)
        self.target = embedding(policy, config.hidden_sizes, config.embedding_size).requires_grad_(False)
        self.predictor = embedding(policy, config.hidden_sizes, config.embedding_size)

    def reward(self, rows: Rows) -> Tensor:
        """`[B]`: ‖f̂(s′) − f(s′)‖², as the mean over the embedding."""
        predicted, wanted = (net(rows.next_observations, self.normalizer) for net in (self.predictor, self.target))
        errors: Tensor = (predicted - wanted).square().mean(dim=1)
        return errors

    def loss(self, rows: Rows, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        loss = self.reward(rows).mean()
        return loss, {"train/rnd_loss": loss.detach()}


class ICM(RewardSignal):
    def __init__(self, policy: Policy, config: ICMConfig) -> None:
        super().__init__(policy)
        self._forward_weight = config.forward_weight
        self.actions = ActionEncoding(policy.spaces.action)
        size, hidden = config.embedding_size, config.model_sizes
        self.features = embedding(policy, config.hidden_sizes, size)
        self.forward_model = mlp(size + self.actions.size, hidden, size, "relu")
        self.inverse_model = mlp(2 * size, hidden, self.actions.size, "relu")

    def reward(self, rows: Rows) -> Tensor:
        """The forward model's error (equation 7, without η: rewards are scaled)."""
        return self._errors(rows)[0]

    def loss(self, rows: Rows, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        forward, inverse = (errors.mean() for errors in self._errors(rows))
        loss = (1 - self._forward_weight) * inverse + self._forward_weight * forward
        terms = {"train/icm_loss": loss, "train/icm_forward_loss": forward, "train/icm_inverse_loss": inverse}
        return loss, {name: value.detach() for name, value in terms.items()}

    def _errors(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """`[B]` of the forward and of the inverse model: ½ ‖φ̂(s′) − φ(s′)‖², and how wrong the guessed action is."""
        here, there = (self.features(seen, self.normalizer) for seen in (rows.observations, rows.next_observations))
        action = self.actions(rows.actions)
        predicted = self.forward_model(torch.cat([here, action], dim=1))
        guessed = self.inverse_model(torch.cat([here, there], dim=1))
        return 0.5 * (predicted - there).square().sum(dim=1), self.actions.errors(guessed, action)


class GAIL(RewardSignal):
    needs_next = False
    scaled = False
    clip = 10.0

    def __init__(self, policy: Policy, config: GAILConfig, demonstrations: Demonstrations | None) -> None:
        super().__init__(policy)
        if demonstrations is None:
            raise ConfigError("algorithm.reward_signals.gail imitates nothing without demonstrations.path")
        self.demonstrations = demonstrations
        self._penalty = config.gradient_penalty
        self.actions = ActionEncoding(policy.spaces.action) if config.use_actions else None
        self.inputs = Encoder(policy.spaces.observation.own, policy.config.model_copy(update={"hidden_sizes": ()}))
        width = self.inputs.features + (self.actions.size if self.actions is not None else 0)
        self.mlp = mlp(width, config.hidden_sizes, 1, "tanh")
        self.begun: Tensor
        self.register_buffer("begun", torch.zeros((), dtype=torch.bool))

    def observe(self, observations: Mapping[str, Tensor]) -> None:
        """Adds observations to the statistics, after those of the demonstrations."""
        if not self.begun:
            shown = self.demonstrations.columns
            super().observe({name: torch.from_numpy(shown[name]).to(self.begun.device) for name in observations})
            self.begun.fill_(True)
        super().observe(observations)

    def reward(self, rows: Rows) -> Tensor:
        """−ln(1 − D), where D is how probable it is that the step was demonstrated."""
        return functional.softplus(self._judged(self._features(rows.observations, rows.actions)))

    def loss(self, rows: Rows, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy on these and as many demonstrated steps, with the penalty on steps between them."""
        shown = self.demonstrations.draw(len(rows), generator, next(self.parameters()).device)
        features = [self._features(drawn.observations, drawn.actions) for drawn in (shown, rows)]
        ours, theirs = (self._judged(part) for part in reversed(features))
        loss = functional.softplus(-theirs).mean() + functional.softplus(ours).mean()
        terms = {
            "train/gail_loss": loss.detach(),
            "train/gail_demonstrated": torch.sigmoid(theirs.detach()).mean(),
            "train/gail_acted": torch.sigmoid(ours.detach()).mean(),
        }
        mixture = torch.rand(len(rows), 1, generator=generator).to(loss.device)
        between = (mixture * features[0] + (1 - mixture) * features[1]).detach().requires_grad_(True)
        (slope,) = torch.autograd.grad(self._judged(between).sum(), between, create_graph=True)
        return loss + self._penalty * (slope.norm(dim=1) - 1.0).square().mean(), terms

    def _features(self, observations: Mapping[str, Tensor], actions: Mapping[str, Tensor]) -> Tensor:
        features: Tensor = self.inputs(observations, self.normalizer)
        return features if self.actions is None else torch.cat([features, self.actions(actions)], dim=1)

    def _judged(self, features: Tensor) -> Tensor:
        judged: Tensor = self.mlp(features).squeeze(1)
        return judged
