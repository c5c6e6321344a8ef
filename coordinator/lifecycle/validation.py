"""Checks before a run starts: environment, policies, device, sizes, data and servers."""

import logging
import math
import os
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from stagecoach.coordinator.diagnostics.environment_trial import try_environment
from stagecoach.coordinator.diagnostics.store_trial import try_store
from stagecoach.rollout_worker.acting_policies import make_exploration
from stagecoach.rollout_worker.environments.description import check_evaluation, describe_environment
from stagecoach.rollout_worker.environments.factory import make_native, make_vector
from stagecoach.rollout_worker.environments.parameters import EpisodeParameters
from stagecoach.rollout_worker.environments.vector_env import NamedFailures, reject_unusable
from stagecoach.shared.base.address import Address
from stagecoach.shared.base.errors import ConfigError, EnvironmentFailure, EnvironmentUnusable, UserError, headline
from stagecoach.shared.base.printable import counted
from stagecoach.shared.base.process import keeping_sigterm
from stagecoach.shared.base.user_code import raised
from stagecoach.shared.config.algorithms.replay_buffer import OwnReplay
from stagecoach.shared.config.compatibility import check_algorithm, in_its_place
from stagecoach.shared.config.environments.parameters import evaluated_table
from stagecoach.shared.config.rollout import window
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.datasets.read import read_dataset
from stagecoach.shared.experience.counters import Counters
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.policies.actor_critic import ActorCritic
from stagecoach.shared.policies.policy import Policy
from stagecoach.shared.policies.registry import build_policies
from stagecoach.shared.protocol.redis_client import check_redis
from stagecoach.shared.storage.object_store import open_store
from stagecoach.trainer_node.learning.algorithms.off_policy import make_replay_buffer
from stagecoach.trainer_node.learning.building_blocks.compilation import check_compiling
from stagecoach.trainer_node.learning.folds import own_folds
from stagecoach.trainer_node.learning.learner import ExperienceFilter, algorithm_class
from stagecoach.trainer_node.learning.reward_signals.own_signal import make_own_signal
from stagecoach.trainer_node.metrics.writers import check_writers

_LOGGER = logging.getLogger("stagecoach.coordinator")
_MOST_VALUE_BYTES = 511 << 20
"""Below Redis's limit of 512 MiB a value (proto-max-bulk-len), which includes names and a header."""
_WORKERS_PER_CORE = 2
"""Workers also wait, for credit and for the network, so that some more than cores are useful."""
_TRAINED_COPIES = 4
"""Weights, their gradients, and Adam's two moments."""


def check(config: Config, inline: bool = False, strict: bool = False) -> EnvironmentDescription:
    """Tries the environment and builds the policies once; rejects what would fail or block later.

    The environment is tried in another process; with `inline` it is only created, here, where a debugger sees it. With
    `strict` it must not raise at all.

    Raises `EnvironmentUnusable`, `UnsupportedSpace` or `ConfigError`.
    """
    for policy_id in sorted(config.policies):
        try:
            algorithm = config.algorithm_of(policy_id)
            check_algorithm(config, policy_id, algorithm)
            algorithm_class(algorithm)
            make_exploration(algorithm.acting, Counters())
        except (ConfigError, ValueError) as error:  # of custom algorithms: built-in ones were checked earlier
            raise ConfigError(in_its_place(config, policy_id, str(error))) from None
    if inline and config.trainer.ranks > 1:
        raise ConfigError(
            f"--inline runs all roles in one process, but trainer.ranks={config.trainer.ranks} needs a process each; "
            f"leave --inline out, or set trainer.ranks=1"
        )
    if not inline:
        _check_not_shadowed(Path.cwd())
    if config.environment.api == "external":  # its clients have it, and nothing can be tried here
        description = describe_environment(config)
    elif inline:
        description = describe_environment(config)
        if config.environment.vectorization == "native":
            make_native(config.environment).close()
        check_evaluation(config, description)
        _reset_once(config, description)
    else:
        description = try_environment(config).refuse(config, strict)
    check_description(config, description)
    return description


def _check_not_shadowed(folder: Path) -> None:
    """Rejects a module of our name in a folder that Ray's processes import from first."""
    ours = sys.modules["stagecoach"].__file__ or ""
    for path in (folder / "stagecoach.py", folder / "stagecoach" / "__init__.py"):
        if path.is_file() and not path.samefile(ours):
            raise UserError(
                f"{path} hides the installed package stagecoach from Ray's processes; rename it, or start from another "
                f"folder"
            )


def check_description(config: Config, description: EnvironmentDescription) -> None:
    """Builds the policies once for the environment's spaces; raises `UnsupportedSpace` or `ConfigError`."""
    for policy_id, policy in config.policies.items():
        ExperienceFilter(policy, f"policies.{policy_id}")
        replay_buffer = config.algorithm_of(policy_id).replay
        if isinstance(replay_buffer, OwnReplay):
            make_replay_buffer(replay_buffer.model_copy(update={"capacity": 1}), description.policies[policy_id], 1, 1)
    own_folds(config)
    _check_networks(config, partial(build_policies, description.policies, config.policies, config.algorithm, seed=0))
    here = config.ray.address == "embedded"  # a cluster's trainer machine may differ
    check_writers(config.metrics, here)
    for field, device in (("trainer.device", config.trainer.device), ("rollout.device", config.rollout.device)):
        if here and device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(f"{field}={device}, but PyTorch finds no CUDA device here; use cpu or auto")
    if config.trainer.compile:
        check_compiling(here=here)
    rollout = config.rollout
    fragment = description.fragment_bytes(config.fragment_rows, config.environment.num_envs, config.state_sizes)
    most = window(rollout.max_policy_lag, rollout.fragments_per_update)
    leaves = [leaf for spaces in description.policies.values() for leaf in spaces.observation.leaves]
    images = any(leaf.is_image for leaf in leaves)  # compressed by an unknown factor
    if fragment > _MOST_VALUE_BYTES and not images:
        raise ConfigError(
            f"a fragment of about {fragment} bytes exceeds the largest value in Redis ({_MOST_VALUE_BYTES} bytes); "
            f"lower rollout.fragment_steps or environment.num_envs, and raise rollout.fragments_per_update instead"
        )
    if fragment * (most + rollout.fragments_per_update) > rollout.max_log_bytes:
        raise ConfigError(
            f"rollout.max_log_bytes={rollout.max_log_bytes} cannot hold the fragments in flight: {most} + "
            f"{rollout.fragments_per_update} of about {fragment} bytes each, so workers and trainer would deadlock; "
            f"raise it, or lower rollout.fragment_steps or environment.num_envs"
        )


def _reset_once(config: Config, description: EnvironmentDescription) -> None:
    """Raises `EnvironmentUnusable` for permanent defects in the first reset, such as a missing mask.

    An environment that raises is tolerated (`environment.failures_allowed`).
    """
    one = config.environment.model_copy(update={"num_envs": 1, "vectorization": "sync"})
    table = evaluated_table(one.parameters, {})
    with closing(make_vector(one, description, EpisodeParameters(table, 1) if table else None)) as environment:
        try:
            with NamedFailures("reset"):
                first = environment.reset([0])
            seen = {policy_id: {**columns, "mask": acts > 0} for policy_id, (columns, acts) in first.items()}
            reject_unusable(seen, description)
        except EnvironmentFailure as error:
            raised = error.__context__
            if raised is None or isinstance(raised, EnvironmentUnusable):
                raise EnvironmentUnusable(f"{one.id}: {headline(raised or error)}") from None


def _check_networks(config: Config, build: Callable[[], dict[str, Policy]]) -> None:
    """Builds the policies once, after checking that they fit in memory and in a policy version."""
    try:
        with torch.device("meta"):  # sizes without memory
            size = _size(build())
    except Exception:  # a custom class may need real tensors
        size = _size(build())
    memory = memory_bytes()
    copies = _TRAINED_COPIES if config.ray.address == "embedded" else 1
    smaller = "make the network smaller (policies.<id>.hidden_sizes)"
    if size * copies > memory:
        trained = ", and training four times as much" if copies > 1 else ""
        raise ConfigError(
            f"the policies take {size / 1e9:,.1f} GB{trained}, but a process on this machine has "
            f"{memory / 1e9:,.1f} GB; {smaller}"
        )
    if config.policy_versions.transport == "redis" and size > _MOST_VALUE_BYTES:
        raise ConfigError(
            f"a policy version of {size} bytes exceeds the largest value in Redis ({_MOST_VALUE_BYTES} bytes); set "
            f"policy_versions.transport: object_store, or {smaller}"
        )
    with keeping_sigterm():  # PyTorch's threads start here, and could take the signal during Ray's join
        for policy_id, policy in build().items():  # perhaps gigabytes, freed at once
            _try_own_parts(config, policy_id, policy)


@torch.no_grad()
def _try_own_parts(config: Config, policy_id: str, policy: Policy) -> None:
    """Makes custom reward signals, and lets a custom network act once; raises `ConfigError`."""
    signals, own = config.algorithm_of(policy_id).signals, config.policies[policy_id].network
    for name in signals.own if signals else ():
        make_own_signal(name, getattr(signals, name), policy)
    if own is None:
        return
    where = f"policies.{policy_id}.network={own.path}"
    zeros = policy.spaces.observation.zeros("obs", 2)
    observed = {name: torch.from_numpy(array) for name, array in zeros.items()}

    def check_shape(what: str, found: Tensor, *expected: int, advice: str = "") -> None:
        if found.shape != expected:
            raise ConfigError(
                f"{where}: {what} returned {list(found.shape)} for 2 observations; expected {list(expected)}{advice}"
            )

    try:
        for name in ("actor", "encoder"):
            encoder = getattr(policy, name, None)
            if isinstance(width := getattr(encoder, "features", None), int):
                found = encoder(observed, policy.normalizer)  # type: ignore[misc]
                check_shape(f"its {name}", found, 2, width, advice=f", as its `features` is {width}")
        params, _ = policy.step(observed, policy.initial_state(2))
        alone, _ = policy.step({name: rows[:1] for name, rows in observed.items()}, policy.initial_state(1))
        check_shape("step", params, 2, getattr(policy.distribution, "parameters", params.shape[-1]))
        if isinstance(policy, ActorCritic) and not policy.agents:
            check_shape("value", policy.value(observed), 2)
            acting, value = policy.action_parameters_and_value(observed)
            check_shape("action_parameters_and_value", acting, *params.shape)
            check_shape("action_parameters_and_value (value)", value, 2)
        actions = policy.distribution.mode(params)
        policy.estimates(observed, policy.initial_state(2))
        for leaf in policy.spaces.action.leaves:
            check_shape("its distribution's mode", actions[leaf.column("action")], 2, *leaf.shape)
    except ConfigError:
        raise
    except Exception as failed:
        inputs = ", ".join(f"{name} {list(rows.shape)} {rows.dtype}" for name, rows in observed.items())
        raise ConfigError(f"{where}: step {raised(failed)}; the observations were {inputs}") from failed
    if params.isnan().any():
        raise ConfigError(f"{where}: step gives NaN for observations of zeros; expected finite numbers")
    if not torch.allclose(params[:1], alone, rtol=1e-4, atol=1e-5):
        raise ConfigError(
            f"{where}: step gives other values for the same observation again, alone in a batch; acting and learning "
            f"must agree, so leave out dropout, batch normalization and noise, and keep what changes in buffers"
        )


def memory_bytes(groups: Path = Path("/sys/fs/cgroup"), mine: Path = Path("/proc/self/cgroup")) -> int:
    """Memory of the machine, or the limit of this process's control groups (containers, SLURM) if lower."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in mine.read_text().splitlines() if mine.exists() else ():
        _, controllers, path = line.split(":", 2)
        folder, name = (groups / "memory", "memory.limit_in_bytes") if controllers else (groups, "memory.max")
        if controllers and "memory" not in controllers.split(","):
            continue
        parts = PurePosixPath(path).parts[1:]
        for depth in range(len(parts) + 1):  # the limits of parent groups apply too
            with suppress(OSError, ValueError):  # `max`: unlimited
                found.append(int(folder.joinpath(*parts[:depth], name).read_text()))
    return min(found)


def available_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores of the machine that this process may use, by its affinity and its container's quota."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # `max`: unlimited
        most, period = map(int, quota.read_text().split())
        found = min(found, math.ceil(most / period))
    return found


def excess_workers(config: Config, cores: int) -> str | None:
    """Returns a warning if embedded Ray would run far more workers than this machine has cores."""
    if config.ray.address != "embedded" or config.rollout.workers <= _WORKERS_PER_CORE * cores:
        return None
    return (
        f"rollout.workers={config.rollout.workers} on {counted(cores, 'core')}: {cores} can act at once, others wait "
        f"for a core, and each takes 0.3 GB of memory; set rollout.workers={cores}"
    )


def _size(policies: dict[str, Policy]) -> int:
    return sum(part.nbytes for policy in policies.values() for part in (*policy.parameters(), *policy.buffers()))


def with_recorded(config: Config, description: EnvironmentDescription) -> Config:
    """Adds the SHA-256 of dataset and demonstrations to the config.

    Raises `DatasetError` if one is unreadable, does not fit the environment, or does not match the config.
    """
    sections = [section for section in (config.dataset, config.demonstrations) if section is not None]
    wanted = {item.section: description.of(config.recorded(item.section)) for item in sections}
    hashes = {item.section: {"sha256": read_dataset(item, wanted[item.section]).sha256} for item in sections}
    return config.model_copy(update={item.section: item.model_copy(update=hashes[item.section]) for item in sections})


def check_services(config: Config) -> None:
    """Tries an external Redis or store once; raises `RedisUnavailable` or `StoreUnavailable`."""
    if config.redis.url != "embedded":
        check_redis(Address("", config.redis.url, ""), config, "coordinator")
    if config.store.url != "embedded":
        store = open_store(Address("doctor", "", config.store.url, config.store.endpoint_url), config)
        if config.store.url.startswith("file:"):
            store.check()
        elif refused := try_store(store):
            _LOGGER.warning("%s", refused)
