"""Plain networks of Stagecoach's `policy.safetensors` in NumPy, for clients that act themselves.

    session = Session(url, token, "robot", policy=Policy)

Reads fully connected networks that observe one vector: of ppo, a2c, appo and impala, sac, and dqn.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

_ACTIVATIONS: dict[str, Any] = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


class Policy:
    """One version of a policy."""

    def __init__(self, blob: bytes, seed: int | None = None) -> None:
        """Reads the file; raises `ValueError` for a network of another form."""
        start = 8 + int.from_bytes(blob[:8], "little")
        entries = json.loads(blob[8:start])
        header = json.loads(entries.pop("__metadata__")["stagecoach"].partition(" ")[2])
        self._arrays: dict[str, Any] = {}
        for name, its in entries.items():
            first, last = (start + offset for offset in its["data_offsets"])
            if its["dtype"] == "F32":
                self._arrays[name] = np.frombuffer(blob[first:last], np.float32).reshape(its["shape"])
        (self._seen, *more), (self._acted, *others) = (
            header["spaces"][kind]["leaves"] for kind in ("observation", "action")
        )
        config, network = header["config"], header["network"]
        plain = not (more or others or config["layer_norm"] or config["transform"] or config["core"] != "none")
        plain = plain and header["kind"] in ("actor_critic", "actor", "q_network") and self._seen["kind"] == "box"
        if not plain or network.get("dueling") or network.get("noisy") or network.get("head", "expected") != "expected":
            raise ValueError(f"a {header['kind']} with the settings {config} is not a plain network of one vector")
        self.version: int = header["version"]
        self._kind, self._activation = header["kind"], _ACTIVATIONS[config["activation"]]
        encoder = "encoder" if self._kind == "q_network" else "actor"
        names = [name[: -len(".weight")] for name in self._arrays if name.endswith(".weight")]
        layers = sorted(
            (name for name in names if name.startswith(f"{encoder}.mlp.")), key=lambda name: int(name.split(".")[2])
        )
        heads = sorted(name for name in names if name.startswith("advantage.")) or ["head"]
        self._layers = [(self._arrays[f"{name}.weight"].T, self._arrays[f"{name}.bias"]) for name in layers + heads]
        self._random = np.random.default_rng(seed)

    def act(self, observation: Any, exploration: dict[str, Any]) -> tuple[Any, Any]:
        """Returns the chosen action as the gateway has to get it, and as the environment does (within its bounds)."""
        kind, random = exploration["kind"], self._random
        sizes, shape = self._acted.get("nvec") or [], self._acted["shape"]
        if kind == "random" and not sizes:
            low, high = self._bounds()
            action = random.uniform(low, high)
        elif self._kind == "q_network" or sizes:
            outputs = np.split(self._outputs(observation), np.cumsum(sizes)[:-1])
            explores = kind == "random" or (kind == "epsilon_greedy" and random.random() < exploration["epsilon"])
            drawn = kind == "sampling" and self._kind != "q_network"
            choices = [
                int(random.integers(len(each)))
                if explores
                else int(np.argmax(each + random.gumbel(size=len(each)) * drawn))
                for each in outputs
            ]
            picked = (np.array(choices).reshape(shape) + np.reshape(self._acted["start"], shape)).tolist()
            return picked, picked
        else:
            outputs = self._outputs(observation)
            mean, log_std = (outputs, self._arrays["log_std"]) if self._kind == "actor_critic" else np.split(outputs, 2)
            action = mean + np.exp(np.clip(log_std, -20, 2)) * random.standard_normal(len(mean)) * (kind == "sampling")
            if self._kind == "actor":
                low, high = self._bounds()
                action = low + (np.tanh(action) + 1) / 2 * (high - low)
        low, high = self._bounds()
        return action.reshape(shape).tolist(), np.clip(action, low, high).reshape(shape).tolist()

    def _bounds(self) -> Any:
        size = int(np.prod(self._acted["shape"]))
        return (np.broadcast_to(np.asarray(self._acted[side], np.float32), size) for side in ("low", "high"))

    def _outputs(self, observation: Any) -> Any:
        values = np.asarray(observation, np.float32).ravel()
        shift, scale, bound = (self._arrays.get(f"normalizer.moments.0.{name}") for name in ("shift", "scale", "bound"))
        if shift is not None and scale is not None and bound is not None:
            values = np.clip((values - shift) * scale, -bound, bound)
        for number, (weight, bias) in enumerate(self._layers, 1):
            values = values @ weight + bias
            if number < len(self._layers):
                values = self._activation(values)
        return values
