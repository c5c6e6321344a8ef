"""`trainer.compile`: every algorithm learns the same by it but for rounding, and the same bits each time.

They compile for real, which needs a C++ compiler.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stagecoach.coordinator.lifecycle.validation import check
from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.shared.base.errors import ConfigError
from stagecoach.shared.config.algorithms.registry import ALGORITHMS
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import Columns
from stagecoach.trainer_node.learning.building_blocks.compilation import (
    check_compiling,
    compiled,
    equal_parts,
    has_compiler,
)
from stagecoach.trainer_node.learning.building_blocks.interface import Setting, Shard
from stagecoach.trainer_node.learning.building_blocks.optimization import Adam, gradient_step
from stagecoach.trainer_node.learning.learner import make_learner, set_up_torch
from tests.conftest import minimal_config
from tests.support.learning.algorithms import make
from tests.support.learning.cases import config_of
from tests.support.learning.experience import random_fragment, weights_after_updates
from tests.support.learning.learners import Side
from tests.support.runs.game import NewGame, goes_on_exactly, small

ELSEWHERE = {
    "ray": {"address": "auto"}, "redis": {"url": "redis://there"}, "store": {"url": "s3://there"},
}  # fmt: skip
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="torch.compile needs a C++ compiler")
pytestmark = [
    pytest.mark.compile,
    pytest.mark.timeout(300),  # where nothing is in its cache
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),  # PyTorch's own, as it loads its compiler
]
CPU = torch.device("cpu")
TWO_LOSSES = {"td3", "td3_bc", "ddpg", "sac", "tqc", "cql", "iql"}


@needs_compiler
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_compiled_algorithms_learn_the_same_and_repeatably(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = weights_after_updates(make(name, shape=(4, 3)))
    losses = []
    fused = torch.compile

    def counting(loss: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        fast = fused(loss, **options)

        def call(*arguments: Any) -> Any:
            losses.append(loss.__name__)  # type: ignore[attr-defined,unused-ignore]
            return fast(*arguments)

        return call

    monkeypatch.setattr(torch, "compile", counting)
    first, again = (weights_after_updates(make(name, shape=(4, 3), setting={"compile": True})) for _ in range(2))
    assert len(set(losses)) == (2 if name in TWO_LOSSES else 1), losses
    assert all(np.array_equal(first[key], again[key]) for key in first)
    assert all(np.allclose(first[key], plain[key], atol=1e-5) for key in first)


@needs_compiler
@pytest.mark.parametrize("case", ["ppo", "dqn", "sac"])
def test_compiled_run_resumes_exactly(new_game: NewGame, tmp_path: Path, case: str) -> None:
    goes_on_exactly(new_game, config_of(case, tmp_path, trainer={"compile": True}, archive="all"))


@needs_compiler
def test_batch_figures_cause_no_recompilation() -> None:
    """IMPALA's batches have figures, which change with each update; a rank takes its part of them."""

    class Half(Shard):
        def rows(self, count: int) -> slice:
            return slice(0, count // 2)

    algorithm, counters = make("impala", shape=(4, 3), setting={"compile": True}), Counters()
    algorithm.shard = Half()
    for number in range(12):
        algorithm.update([random_fragment(algorithm.policy, number)], counters)
        counters.updates += 1


def test_setting_transitions_equal_a_full_update(monkeypatch: pytest.MonkeyPatch) -> None:
    config = minimal_config(
        environment={"id": "CartPole-v1", "num_envs": 3}, trainer={"compile": True},
        rollout={"fragment_steps": 8, "fragments_per_update": 5}, algorithm={"minibatch_size": 50},
    )  # fmt: skip
    seen = []

    def noted(loss: Any, setting: Setting, sizes: set[int], optimizer: Adam) -> Any:
        seen.append((setting.transitions, setting.compile, sizes))
        return loss

    monkeypatch.setattr("stagecoach.trainer_node.learning.algorithms.on_policy.compiled", noted)
    make_learner(config, describe_environment(config))
    assert seen == [(120, True, {40})]


@pytest.mark.parametrize(("count", "size"), [(1, 1), (64, 20), (7, 3), (4096, 512), (5, 8), (4095, 512)])
def test_equal_parts_are_those_that_tensors_are_split_into(count: int, size: int) -> None:
    parts = torch.arange(count).tensor_split(-(-count // size))
    assert equal_parts(count, size) == {len(part) for part in parts}
    assert equal_parts(0, size) == set()


def how(batch: Tensor, factor: float = 1.0) -> tuple[bool, Tensor]:
    """Whether it is compiled."""
    return torch.compiler.is_compiling(), batch * factor


@needs_compiler
def test_only_full_batches_are_compiled_when_configured() -> None:
    setting = Setting(CPU, 1, 1, 1, compile=True)
    assert compiled(how, Setting(CPU, 1, 1, 1), {4}) is how
    loss = compiled(how, setting, {4, 5})
    assert [loss(torch.ones(rows))[0] for rows in (3, 4, 5, 6, 40, 4)] == [False, True, True, False, False, True]
    for number in range(1, 40):  # what a schedule moves is no code of its own
        here, product = loss(torch.ones(4), 1 / number)
        assert here and product.tolist() == pytest.approx([1 / number] * 4)


@needs_compiler
def test_compiled_loss_leads_to_its_optimizers_parameters_alone() -> None:
    """The graph has the gradients, so whatever is made of the loss afterwards moves the optimizer as without it."""
    torch.manual_seed(1)
    images = torch.randn(4, 2, 5, 5)
    convolution = nn.Conv2d(2, 3, 3)
    convolution.weight.data = convolution.weight.data.contiguous(memory_format=torch.channels_last)
    layer = nn.Sequential(convolution, nn.Flatten())
    others, beside, idle = (nn.Linear(27, 1), nn.Linear(27, 1), nn.Parameter(torch.ones(3)))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    adam = Adam([*layer.parameters(), idle, nn.Parameter(torch.empty(0)), frozen], 1e-8)

    def loss(batch: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        features = layer(batch)
        value = factor * others(features).square().mean()
        return value, features

    def stepped(made: Callable[..., Any]) -> tuple[Tensor, Columns]:
        adam.load_state({})
        others.zero_grad()
        value, features = made(images, 3.0)
        assert features.requires_grad == (made is loss)
        norm = gradient_step(0.5 * value + beside(layer(images)).mean(), adam, 0.0, None, all_inputs=True)
        assert (others.weight.grad is not None) == (made is loss)
        return norm, adam.state()

    (plainly, before), (fast, after) = (
        stepped(loss),
        stepped(compiled(loss, Setting(CPU, 1, 1, 1, compile=True), {4}, adam)),
    )
    assert before.keys() == after.keys()
    assert not any(name.startswith("2/") for name in after)  # `idle` has had no gradient
    assert fast.item() == pytest.approx(plainly.item(), rel=1e-5)
    assert all(np.allclose(before[name], after[name], rtol=1e-4, atol=1e-7) for name in before)


@needs_compiler
def test_loss_that_recompiles_or_cannot_compile_is_refused() -> None:
    class Changing:
        number = 0

        def loss(self, batch: Tensor) -> Tensor:
            return batch * self.number

        def looking(self, batch: Tensor) -> Tensor:
            return batch if batch.sum() > 0 else -batch

    changing, setting = Changing(), Setting(CPU, 1, 1, 1, compile=True)
    loss = compiled(changing.loss, setting, {4})

    def ever() -> None:
        for changing.number in range(40):
            assert loss(torch.ones(4)).tolist() == [changing.number] * 4

    with pytest.raises(ConfigError, match=r"Changing\.loss cannot be compiled: .*recompile limit"):
        ever()
    assert 1 < changing.number < 40
    with pytest.raises(
        ConfigError, match=r"Changing\.looking cannot be compiled: Data-dependent branching; it may read only"
    ):
        compiled(changing.looking, setting, {4})(torch.ones(4))


@needs_compiler
def test_learners_that_are_gone_count_for_nothing() -> None:
    """Each life of a trainer in one process has its own."""

    class Scaling:
        def __init__(self, factor: float) -> None:
            self.factor = torch.tensor(factor)

        def loss(self, batch: Tensor) -> Tensor:
            return batch * self.factor

    setting = Setting(CPU, 1, 1, 1, compile=True)
    assert torch._dynamo.config.accumulated_recompile_limit > 10**6
    for number in range(20):
        loss = compiled(Scaling(float(number)).loss, setting, {4})
        assert loss(torch.ones(4)).tolist() == [number] * 4


@needs_compiler
def test_compiler_failure_is_reported_with_its_output(tmp_path: Path) -> None:
    """Forward or backward, in a process of its own: PyTorch looks at its compiler once."""
    failing = tmp_path / "failing-compiler"
    failing.write_text('#!/bin/sh\ncase "$*" in *--version*) exec g++ "$@";; esac\necho no room left >&2; exit 1\n')
    failing.chmod(0o755)
    script = (
        "import torch\n"
        "from tests.trainer_node.learning.building_blocks.test_compilation import how, compiled, Setting, CPU\n"
        "compiled(how, Setting(CPU, 1, 1, 1, compile=True), {4})(torch.ones(4, requires_grad=True))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=200,
        env={**os.environ, "CXX": str(failing), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
    )  # fmt: skip
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(
        r"ConfigError: trainer\.compile: how cannot be compiled here: .*no room left.*; mend that", last
    ), last


@pytest.mark.parametrize("name", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_compiling_disabled_by_environment_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=f"trainer.compile with {name}=1 in the environment; unset it"):
        check_compiling()


@needs_compiler
def test_checkpoint_names_the_compiler() -> None:
    taken = Side(small(trainer={"compile": True})).taken()
    assert re.match(r"g\+\+ .*\d for [A-Z0-9]+$", taken.checkpoint.manifest.provenance["computed_with"]["compiled"])
    assert "compiled" not in Side(small()).taken().checkpoint.manifest.provenance["computed_with"]


def test_missing_compiler_is_refused_before_learning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    threads = torch.get_num_threads()
    trainer = minimal_config(trainer={"compile": True, "torch_threads": threads}).trainer
    with pytest.raises(
        ConfigError, match=r"needs a C\+\+ compiler where the trainer runs, and no-such-compiler is not"
    ):
        set_up_torch(trainer)
    set_up_torch(trainer.model_copy(update={"compile": False}))
    with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler"):
        check(minimal_config(trainer={"compile": True}))
    check(minimal_config(trainer={"compile": True}, **ELSEWHERE))  # the trainer's machine has to have it
