"""GAE, V-trace and n-step returns, compared with TorchRL's.

TorchRL's V-trace has no λ, and its prioritised sampler is compiled code that its wheel has for other versions of torch
only. What this leaves open, and hindsight and balanced memories, are compared with slow loops: test_vtrace.py and
memories/.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrl.data.postprocs import MultiStep
from torchrl.objectives.value.functional import generalized_advantage_estimate, vtrace_advantage_estimate

from shared.spaces import Array
from tests.trainer_node.memories.streams import PLAIN, Stream
from tests.trainer_node.test_gae import random_case
from tests.trainer_node.test_vtrace import random_case as random_vtrace_case
from trainer_node.memories.replay import ReplayMemory


def by_slots(columns: Tensor | Array) -> Tensor:
    """`[T, S]` → `[S, T, 1]`."""
    return torch.as_tensor(columns).T.unsqueeze(-1)


def precise(number: float) -> Any:
    """Of a plain number TorchRL makes float32."""
    return torch.tensor(number, dtype=torch.float64)


def following(case: Any) -> Array:
    """What each step led to is worth, had nothing terminated."""
    found: Array = np.concatenate([case.value[1:], case.bootstrap_value[None]])
    for (step, slot), value in case.final_value.items():
        found[step, slot] = value
    return found


def ends(case: Any) -> dict[str, Tensor]:
    return {"done": by_slots(case.terminated | case.truncated), "terminated": by_slots(case.terminated)}


@pytest.mark.parametrize("seed", range(8))
def test_gae(seed: int) -> None:
    case = random_case(seed, steps=12, slots=3, absent=0.0)
    advantage, _ = generalized_advantage_estimate(
        precise(case.gamma),
        case.gae_lambda,
        by_slots(case.value),
        by_slots(following(case)),
        by_slots(case.reward),
        **ends(case),
    )
    assert case.terminated.any() and case.truncated.any()
    np.testing.assert_allclose(case.found(), advantage.squeeze(-1).T, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("seed", range(8))
def test_v_trace(seed: int) -> None:
    case = random_vtrace_case(seed, 12, 3)
    case.mask[:], case.vtrace_lambda = True, 1.0
    advantage, target = vtrace_advantage_estimate(
        precise(case.gamma), by_slots(case.log_ratio), torch.zeros(3, 12, 1), by_slots(case.value),
        by_slots(following(case)), by_slots(case.reward), **ends(case), rho_thresh=case.rho_bar, c_thresh=case.c_bar,
    )  # fmt: skip
    found = case.found()
    np.testing.assert_allclose(found.target, target.squeeze(-1).T, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(found.weight * found.advantage, advantage.squeeze(-1).T, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("n_step", [1, 3, 5])
def test_n_step_returns(n_step: int) -> None:
    """One fragment of 20 steps × 3 slots: what follows it is not known to either."""
    stream = Stream(4, PLAIN, 20, 3)
    stream.absent = 0.0
    (made,) = stream.fragments(1)
    columns, gamma = made.columns, 0.9
    assert columns["terminated"].any() and columns["truncated"].any()
    led_to = np.concatenate([columns["obs"][1:], columns["bootstrap_obs"][None]])
    led_to[tuple(columns["final_index"].T)] = columns["final_obs"]
    terminated, over = by_slots(columns["terminated"]), by_slots(columns["terminated"] | columns["truncated"])
    after = {"obs": torch.from_numpy(led_to).transpose(0, 1), "reward": by_slots(columns["reward"]), "done": over}
    after["gone"] = terminated  # of the step that is bootstrapped from: it moves along with the observation
    told = MultiStep(gamma, n_step)(TensorDict({"next": after}, [3, 20]))
    memory = ReplayMemory(PLAIN, 20, 3, 60)
    memory.add(made.source, columns)
    drawn = memory.sample(400, np.random.default_rng(0), gamma=gamma, n_step=n_step)
    assert len(set(drawn.row)) > 50
    step, slot = np.divmod(drawn.row, 3)
    theirs = told[torch.from_numpy(slot), torch.from_numpy(step)]
    np.testing.assert_allclose(drawn.reward, theirs["next", "reward"].squeeze(-1), rtol=1e-5, atol=1e-6)
    goes_on = ~theirs["next", "gone"].squeeze(-1)
    discount = gamma ** theirs["steps_to_next_obs"].reshape(-1).to(torch.float32) * goes_on
    np.testing.assert_allclose(drawn.discount, discount, rtol=1e-5)
    np.testing.assert_allclose(drawn.next_observations["obs"][goes_on], theirs["next", "obs"][goes_on], rtol=1e-6)
