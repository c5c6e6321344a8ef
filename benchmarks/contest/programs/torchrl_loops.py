"""PPO or SAC of TorchRL, in the peer's own virtual environment: the loops of its examples (collector, loss module,
replay buffer). Settings: `algorithm` (ppo, sac), `environment`, `threads`, `num_envs`, `collectors` (1, or how many
processes collect in step), `steps` (of each environment in a batch), `layers`, `minibatch`, `epochs`, `compile`,
`seed`, `total_env_steps`, `window`, `arguments` (`lr`, `gamma`, `lmbda`, `clip_epsilon`, `entropy_coeff`,
`anneal_over`). With `keep` (a folder and how many env steps apart) it writes checkpoints by CheckpointRotation, random
states included, and continues from the newest one that is there.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.contest.programs.images import environment
from benchmarks.contest.programs.telling import WINDOW_EPISODES, Teller, given


class Episodes:
    """Their returns, from batches `[environments, steps]`."""

    def __init__(self, environments: int, window: int) -> None:
        import numpy as np

        self._running, self.ended = np.zeros(environments), 0
        self._last: deque[float] = deque(maxlen=window)

    def note(self, batch: Any) -> None:
        """In the order of the steps."""
        reward, done = (batch["next", name].squeeze(-1).numpy() for name in ("reward", "done"))
        for step in range(reward.shape[1]):
            self._running += reward[:, step]
            over = done[:, step]
            if over.any():
                self._last.extend(self._running[over].tolist())
                self.ended += int(over.sum())
                self._running[over] = 0.0

    @property
    def mean_return(self) -> float | None:
        """Of the last ones."""
        return sum(self._last) / len(self._last) if self._last else None


def train(settings: dict[str, Any], tell: Teller) -> None:
    """Until it is ended from outside, or has trained `total_env_steps`."""
    torch.set_num_threads(settings["threads"])
    torch.manual_seed(settings["seed"])
    learner = (_PPO if settings["algorithm"] == "ppo" else _SAC)(settings)
    env_steps, kept = learner.progress["env_steps"], None
    keep: Any = settings.get("keep")
    if keep:
        from torchrl.checkpoint import Checkpoint, CheckpointRotation, GlobalRNGState

        rotation = CheckpointRotation(keep["folder"], keep_last=3)
        kept = Checkpoint(**learner.parts, progress=_Progress(learner.progress), random=GlobalRNGState())
        if rotation.latest() is not None:
            rotation.load_latest(kept)
            env_steps = learner.progress["env_steps"]
    episodes = Episodes(settings["num_envs"], settings.get("window", WINDOW_EPISODES))
    tell(env_steps, 0, None)
    for batch in learner.collected(settings["total_env_steps"] - env_steps):
        episodes.note(batch)
        learner.learn(batch)
        before, env_steps = env_steps, env_steps + batch.numel()
        learner.progress["env_steps"] = env_steps
        tell(env_steps, episodes.ended, episodes.mean_return)
        if kept is not None and before // keep["every_env_steps"] < env_steps // keep["every_env_steps"]:
            rotation.save(kept, step=env_steps)
    tell.end(env_steps, [value.numpy() for value in learner.acting.state_dict().values()])


class _Progress:
    """Env steps so far, as a part of a checkpoint."""

    def __init__(self, held: dict[str, int]) -> None:
        self._held = held

    def state_dict(self) -> dict[str, int]:
        return dict(self._held)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._held.update({name: int(value) for name, value in state.items()})


def vector(name: str, count: int, seed: int) -> Any:
    """So many of them in gymnasium's SyncVectorEnv: TorchRL's own SerialEnv takes several times as long for a step."""
    from gymnasium.vector import AutoresetMode, SyncVectorEnv
    from torchrl.envs import DoubleToFloat, GymWrapper, TransformedEnv

    made = SyncVectorEnv([partial(environment, name)] * count, autoreset_mode=AutoresetMode.SAME_STEP)
    wrapped = GymWrapper(made, categorical_action_encoding=True)
    wrapped.set_seed(seed)
    return TransformedEnv(wrapped, DoubleToFloat()) if "Cheetah" in name or "Pendulum" in name else wrapped


class _Learner:
    """What both algorithms have: networks, collector, and what a checkpoint holds."""

    acting: Any
    loss: Any
    optimizers: dict[str, Any]

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.progress = {"env_steps": 0}
        self.spaces: Any = environment(settings["environment"])

    @property
    def parts(self) -> dict[str, Any]:
        return {"loss": self.loss, **self.optimizers}

    def collected(self, total: int) -> Any:
        """Batches `[environments, steps]`; `total` env steps."""
        from torchrl.collectors import Collector, MultiSyncCollector

        own, collectors = self.settings, self.settings["collectors"]
        batch = own["num_envs"] * own["steps"]
        make = partial(vector, own["environment"], own["num_envs"] // collectors, own["seed"])
        if collectors == 1:
            yield from Collector(make(), self.acting, frames_per_batch=batch, total_frames=total, track_traj_ids=False,
                                 compile_policy=own["compile"] or None)  # fmt: skip
            return
        several = MultiSyncCollector(
            [make] * collectors, self.acting, frames_per_batch=batch, total_frames=total, cat_results=0,
            num_threads=own["threads"], num_sub_threads=1,
        )  # fmt: skip
        for data in several:
            yield data
            several.update_policy_weights_()
        several.shutdown()


class _PPO(_Learner):
    def __init__(self, settings: dict[str, Any]) -> None:
        from tensordict.nn import TensorDictModule
        from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
        from torchrl.modules import ProbabilisticActor, ValueOperator
        from torchrl.objectives import ClipPPOLoss
        from torchrl.objectives.value import GAE

        super().__init__(settings)
        arguments = settings["arguments"]
        images = settings["environment"] == "images"
        spaces, layers = self.spaces, settings["layers"]
        common: Any = _Nature() if images else None
        inputs = 512 if images else spaces.observation_space.shape[0]
        if discrete := hasattr(spaces.action_space, "n"):
            outputs, distribution, names = int(spaces.action_space.n), torch.distributions.Categorical, ["logits"]
        else:
            from torchrl.modules import IndependentNormal

            outputs, distribution, names = spaces.action_space.shape[0], IndependentNormal, ["loc", "scale"]
        actor: Any = _mlp(inputs, layers, outputs)
        critic: Any = _mlp(inputs, layers, 1)
        if images:
            actor, critic = torch.nn.Sequential(common, actor), torch.nn.Sequential(common, critic)
        if not discrete:
            actor = _Gaussian(actor, outputs)
        self.acting = ProbabilisticActor(
            TensorDictModule(actor, ["observation"], names),
            in_keys=names,
            distribution_class=distribution,
            return_log_prob=True,
        )
        value = ValueOperator(critic, in_keys=["observation"])
        self.loss = ClipPPOLoss(
            self.acting, value, clip_epsilon=arguments.get("clip_epsilon", 0.2),
            entropy_coeff=arguments.get("entropy_coeff", 0.0), critic_coeff=0.5, loss_critic_type="l2",
            normalize_advantage=True,
        )  # fmt: skip
        self._gae = GAE(gamma=arguments.get("gamma", 0.99), lmbda=arguments.get("lmbda", 0.95), value_network=value)
        self._lr = arguments.get("lr", 3e-4)
        self._adam = torch.optim.Adam(self.loss.parameters(), lr=self._lr, eps=1e-5, fused=True)
        self.optimizers = {"optimizer": self._adam}
        self._buffer = ReplayBuffer(
            storage=LazyTensorStorage(settings["num_envs"] * settings["steps"]), sampler=SamplerWithoutReplacement(),
            batch_size=settings["minibatch"],
        )  # fmt: skip
        self._descend = torch.compile(self._step) if settings["compile"] else self._step

    def learn(self, batch: Any) -> None:
        if over := self.settings["arguments"].get("anneal_over"):
            self._adam.param_groups[0]["lr"] = self._lr * max(0.0, 1 - self.progress["env_steps"] / over)
        with torch.no_grad():
            batch = self._gae(batch)
        self._buffer.extend(batch.reshape(-1))
        for _ in range(self.settings["epochs"]):
            for minibatch in self._buffer:
                self._descend(minibatch)

    def _step(self, minibatch: Any) -> None:
        losses = self.loss(minibatch)
        total = losses["loss_objective"] + losses["loss_critic"]
        if losses.get("loss_entropy", None) is not None:
            total = total + losses["loss_entropy"]
        self._adam.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.loss.parameters(), 0.5)
        self._adam.step()


class _SAC(_Learner):
    def __init__(self, settings: dict[str, Any]) -> None:
        from tensordict.nn import TensorDictModule
        from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
        from torchrl.objectives import SACLoss, SoftUpdate

        super().__init__(settings)
        arguments = settings["arguments"]
        space, layers = self.spaces.action_space, settings["layers"]
        seen, size = self.spaces.observation_space.shape[0], self.spaces.action_space.shape[0]
        actor = _Squashed(_mlp(seen, layers, 2 * size, torch.nn.ReLU))
        self.acting = ProbabilisticActor(
            TensorDictModule(actor, ["observation"], ["loc", "scale"]), in_keys=["loc", "scale"],
            distribution_class=TanhNormal,
            distribution_kwargs={"low": torch.as_tensor(space.low), "high": torch.as_tensor(space.high)},
        )  # fmt: skip
        critic = ValueOperator(_Joined(_mlp(seen + size, layers, 1, torch.nn.ReLU)), in_keys=["observation", "action"])
        self.loss = SACLoss(self.acting, critic, num_qvalue_nets=2, loss_function="l2", action_spec=None,
                            target_entropy=-float(size))  # fmt: skip
        self.loss.make_value_estimator(gamma=arguments.get("gamma", 0.99))
        self._target = SoftUpdate(self.loss, tau=arguments.get("tau", 0.005))
        groups = {"actor": self.loss.actor_network_params, "critic": self.loss.qvalue_network_params}
        parameters = {name: list(group.flatten_keys().values()) for name, group in groups.items()}
        parameters["alpha"] = [self.loss.log_alpha]
        lr = arguments.get("lr", 3e-4)
        self._adams = {name: torch.optim.Adam(own, lr=lr, fused=True) for name, own in parameters.items()}
        self.optimizers = {f"{name}_optimizer": adam for name, adam in self._adams.items()}
        self._buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(settings["capacity"]), batch_size=settings["minibatch"]
        )
        self._descend = torch.compile(self._step) if settings["compile"] else self._step

    def learn(self, batch: Any) -> None:
        self._buffer.extend(batch.reshape(-1))
        if self.progress["env_steps"] + batch.numel() < self.settings["heatup"]:
            return
        for _ in range(int(batch.numel() * self.settings["gradient_steps_per_env_step"])):
            self._descend(self._buffer.sample())
            self._target.step()

    def _step(self, minibatch: Any) -> None:
        losses = self.loss(minibatch)
        for adam in self._adams.values():
            adam.zero_grad()
        (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).backward()
        for adam in self._adams.values():
            adam.step()


def _mlp(inputs: int, layers: list[int], outputs: int, activation: Any = None) -> Any:
    found: list[Any] = []
    for size in layers:
        found += [nn.Linear(inputs, size), (activation or nn.Tanh)()]
        inputs = size
    return nn.Sequential(*found, nn.Linear(inputs, outputs))


class _Around(nn.Module):
    """A module around one other; at the top level, since collectors in processes of their own receive it pickled."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class _Gaussian(_Around):
    def __init__(self, inner: nn.Module, size: int) -> None:
        super().__init__(inner)
        self.log_std = nn.Parameter(torch.zeros(size))

    def forward(self, seen: Any) -> Any:
        mean = self.inner(seen)
        return mean, self.log_std.exp().expand_as(mean)


class _Squashed(_Around):
    def forward(self, seen: Any) -> Any:
        mean, log_std = self.inner(seen).chunk(2, dim=-1)
        return mean, log_std.clamp(-20, 2).exp()


class _Joined(_Around):
    def forward(self, seen: Any, action: Any) -> Any:
        return self.inner(torch.cat([seen, action], dim=-1))


class _Nature(_Around):
    """Convolutions over bytes `[…, 4, 84, 84]`, as in Mnih et al. 2015."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU(),
            nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
        ))  # fmt: skip

    def forward(self, seen: Any) -> Any:
        ahead = seen.shape[:-3]
        return self.inner(seen.reshape(-1, *seen.shape[-3:]).float() / 255).reshape(*ahead, 512)


if __name__ == "__main__":
    train(*given())
