"""PPO, DQN and SAC as one writes them by hand in one file: plain loops with PyTorch's own optimizer, as a yardstick.

The same mathematics, networks, batches and gradient steps as ours with the settings of benchmarks/suite/learner.py, and
nothing around them: no options, no figures beside those that everybody looks at, no state to go on from.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, smooth_l1_loss

from stagecoach.shared.experience.spaces import Array, Columns

GAMMA, LAMBDA, CLIP, EPOCHS, MAX_NORM = 0.99, 0.95, 0.2, 4, 0.5


def mlp(inputs: int, hidden: tuple[int, ...], outputs: int, activation: type[nn.Module]) -> nn.Sequential:
    """Layers of these widths."""
    layers: list[nn.Module] = []
    for size in hidden:
        layers += [nn.Linear(inputs, size), activation()]
        inputs = size
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


class PlainPPO:
    """One discrete action, actor and critic apart."""

    def __init__(self, inputs: int, choices: int, hidden: tuple[int, ...], minibatch: int, *, fused: bool) -> None:
        self._actor = mlp(inputs, hidden, choices, nn.Tanh)
        self._critic = mlp(inputs, hidden, 1, nn.Tanh)
        self._parameters = [*self._actor.parameters(), *self._critic.parameters()]
        self._adam = torch.optim.Adam(self._parameters, lr=3e-4, eps=1e-5, fused=fused)
        self._minibatch = minibatch

    def update(self, columns: Columns) -> int:
        """From columns `[T, S, …]`; answers the gradient steps."""
        obs, action, acted, reward, done = (
            torch.tensor(columns[name]) for name in ("obs", "action", "log_prob", "reward", "terminated")
        )
        advantage, target = self._advantages(obs, torch.tensor(columns["bootstrap_obs"]), reward, done.float())
        obs, action, acted = obs.flatten(0, 1), action.flatten(), acted.flatten()
        advantage, target = advantage.flatten(), target.flatten()
        rows, steps, kls, clipped = np.arange(len(action)), 0, [], []
        for _ in range(EPOCHS):
            np.random.shuffle(rows)
            for start in range(0, len(rows), self._minibatch):
                some = torch.from_numpy(rows[start : start + self._minibatch])
                kl, share = self._step(obs[some], action[some], acted[some], advantage[some], target[some])
                kls.append(kl)
                clipped.append(share)
                steps += 1
        torch.stack(kls).mean().item(), torch.stack(clipped).mean().item()
        return steps

    @torch.no_grad()
    def _advantages(self, obs: Tensor, after: Tensor, reward: Tensor, done: Tensor) -> tuple[Tensor, Tensor]:
        value, following = self._critic(obs).squeeze(-1), self._critic(after).squeeze(-1)
        advantage, running = torch.zeros_like(reward), torch.zeros_like(reward[0])
        for step in reversed(range(len(reward))):
            goes_on = 1.0 - done[step]
            delta = reward[step] + GAMMA * following * goes_on - value[step]
            advantage[step] = running = delta + GAMMA * LAMBDA * goes_on * running
            following = value[step]
        return advantage, advantage + value

    def _step(
        self, obs: Tensor, action: Tensor, acted: Tensor, advantage: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor]:
        chances = torch.distributions.Categorical(logits=self._actor(obs), validate_args=False)
        log_ratio = chances.log_prob(action) - acted  # type: ignore[no-untyped-call]
        ratio = log_ratio.exp()
        with torch.no_grad():
            kl, clipped = ((ratio - 1) - log_ratio).mean(), ((ratio - 1.0).abs() > CLIP).float().mean()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
        value_loss = (self._critic(obs).squeeze(-1) - target).square().mean()
        entropy = chances.entropy().mean()  # type: ignore[no-untyped-call]
        loss = policy_loss + 0.5 * value_loss - 0.01 * entropy
        self._adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, MAX_NORM)
        self._adam.step()
        return kl, clipped


class PlainMemory:
    """A ring of transitions in NumPy arrays, each with its next observation."""

    def __init__(self, capacity: int, obs: Array, action: Array) -> None:
        self._capacity, self._added = capacity, 0
        self._obs, self._next = (np.zeros((capacity, *obs.shape[2:]), obs.dtype) for _ in range(2))
        self._action = np.zeros((capacity, *action.shape[2:]), action.dtype)
        self._reward, self._done = np.zeros(capacity, np.float32), np.zeros(capacity, np.float32)

    def add(self, columns: Columns) -> None:
        """A fragment, step by step."""
        after = np.concatenate([columns["obs"][1:], columns["bootstrap_obs"][None]])
        for step in range(len(after)):
            rows = (self._added + np.arange(after.shape[1])) % self._capacity
            self._obs[rows], self._next[rows] = columns["obs"][step], after[step]
            self._action[rows], self._reward[rows] = columns["action"][step], columns["reward"][step]
            self._done[rows] = columns["terminated"][step]
            self._added += len(rows)

    def sample(self, count: int) -> list[Tensor]:
        """Observation, action, next observation, reward, done."""
        rows = np.random.randint(0, min(self._added, self._capacity), size=count)
        columns = (self._obs, self._action, self._next, self._reward, self._done)
        return [torch.from_numpy(column[rows]) for column in columns]


class PlainDQN:
    """Double Q-learning with Huber's loss."""

    def __init__(self, network: nn.Module, memory: PlainMemory, minibatch: int) -> None:
        self._online, self._target, self._memory, self._minibatch = network, copy.deepcopy(network), memory, minibatch
        self._adam = torch.optim.Adam(network.parameters(), lr=1e-3, eps=1e-8)
        self._done = 0

    def update(self, columns: Columns, steps: int) -> int:
        """Takes the fragment in, then so many gradient steps."""
        self._memory.add(columns)
        for _ in range(steps):
            obs, action, after, reward, done = self._memory.sample(self._minibatch)
            with torch.no_grad():
                best = self._online(after).argmax(dim=1, keepdim=True)
                target = reward + GAMMA * self._target(after).gather(1, best).squeeze(1) * (1 - done)
            loss = smooth_l1_loss(self._online(obs).gather(1, action.unsqueeze(1)).squeeze(1), target)
            self._adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self._online.parameters(), 10.0)
            self._adam.step()
            self._done += 1
            if self._done % 500 == 0:
                self._target.load_state_dict(self._online.state_dict())
        return steps


class NatureNetwork(nn.Module):
    """Bytes `[B, 4, 84, 84]` → values, as in Mnih et al. 2015, and a hidden layer more."""

    def __init__(self, hidden: int, choices: int) -> None:
        super().__init__()
        self._layers = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
            nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, hidden), nn.ReLU(),
            nn.Linear(hidden, choices),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self._layers(images / 255.0)
        return found


class PlainSAC:
    """Boxes in [-1, 1], two critics, a learned temperature."""

    def __init__(self, inputs: int, size: int, hidden: tuple[int, ...], memory: PlainMemory, minibatch: int) -> None:
        self._memory, self._minibatch, self._size = memory, minibatch, size
        self._actor = mlp(inputs, hidden, 2 * size, nn.ReLU)
        self._critics = nn.ModuleList(mlp(inputs + size, hidden, 1, nn.ReLU) for _ in range(2))
        self._targets = copy.deepcopy(self._critics)
        self._log_alpha = torch.zeros(1, requires_grad=True)
        self._adams = [
            torch.optim.Adam(group, lr=3e-4)
            for group in (self._actor.parameters(), self._critics.parameters(), [self._log_alpha])
        ]

    def _act(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self._actor(obs).chunk(2, dim=-1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-20, 2).exp(), validate_args=False)
        before = normal.rsample()
        action = torch.tanh(before)
        log_prob = normal.log_prob(before) - torch.log(1 - action.square() + 1e-6)  # type: ignore[no-untyped-call]
        return action, log_prob.sum(dim=1)

    def _values(self, critics: Iterable[nn.Module], obs: Tensor, action: Tensor) -> list[Tensor]:
        both = torch.cat([obs, action], dim=1)
        return [critic(both).squeeze(-1) for critic in critics]

    def update(self, columns: Columns, steps: int) -> int:
        """Takes the fragment in, then so many gradient steps."""
        self._memory.add(columns)
        for _ in range(steps):
            self._step(*self._memory.sample(self._minibatch))
        return steps

    def _step(self, obs: Tensor, action: Tensor, after: Tensor, reward: Tensor, done: Tensor) -> None:
        alpha = self._log_alpha.detach().exp()
        with torch.no_grad():
            then, log_prob = self._act(after)
            soft = torch.min(*self._values(self._targets, after, then)) - alpha * log_prob
            target = reward + GAMMA * (1 - done) * soft
        values = self._values(self._critics, obs, action)
        self._descend(1, torch.stack([0.5 * mse_loss(value, target) for value in values]).sum())
        now, log_prob = self._act(obs)
        self._descend(0, (alpha * log_prob - torch.min(*self._values(self._critics, obs, now))).mean())
        self._descend(2, -(self._log_alpha * (log_prob.detach() - self._size)).mean())
        with torch.no_grad():
            for slow, fast in zip(self._targets.parameters(), self._critics.parameters(), strict=True):
                slow.copy_(0.005 * fast + 0.995 * slow)

    def _descend(self, number: int, loss: Tensor) -> None:
        self._adams[number].zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._adams[number].step()
