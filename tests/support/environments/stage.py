"""A sampler with its policies on a real environment, as a worker has it: whatever it samples is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stagecoach.rollout_worker.acting_policies import make_exploration
from stagecoach.rollout_worker.environments.description import describe_environment
from stagecoach.rollout_worker.environments.factory import make_vector
from stagecoach.rollout_worker.environments.seeding import SeedLineage
from stagecoach.rollout_worker.exploration.base import Exploration
from stagecoach.rollout_worker.sampling import action_trace
from stagecoach.rollout_worker.sampling.director import Directors
from stagecoach.rollout_worker.sampling.sampler import Sample, Sampler
from stagecoach.shared.experience import fragment
from stagecoach.shared.experience.counters import Counters, Phase
from stagecoach.shared.experience.fragment import Fragment, FragmentHeader
from stagecoach.shared.policies.registry import build_policies
from tests.conftest import minimal_config


class Stage:
    """A sampler with its policies, checked by `fragment.check` at every sample, and the action trace that it leaves."""

    def __init__(self, environment: dict[str, Any], seed: int = 1, left: Sequence[bytes] = (), **sections: Any) -> None:
        """Resumes the trace `left`, if it is not empty; `sections` are those of the config."""
        sections = {"policies": {"default": {"cnn": "small"}}, "algorithm": {"minibatch_size": 8}} | sections
        self.config = minimal_config(environment={"num_envs": 2} | environment, **sections)
        self.description = describe_environment(self.config)
        self.policies = build_policies(self.description.policies, self.config.policies, self.config.algorithm, 0)
        self.left, self.past = list(left), action_trace.read(list(left))
        directors = self.direct()
        vector = make_vector(self.config.environment, self.description, directors.parameters)
        lineage = self.past.lineage if self.past else SeedLineage(seed, 0, 0, 0)
        rows = self.config.fragment_rows if self.config.rollout.complete_episodes else 0
        self.sampler = Sampler(vector, self.description, lineage, trace=self.past, directors=directors, rows=rows)

    def direct(self) -> Directors:
        """Returns the sampler's directors; subclasses override it."""
        return Directors()

    def sample(self, steps: int = 7, exploration: Exploration | None = None) -> Sample:
        acting = {
            policy_id: exploration or make_exploration(self.config.algorithm.acting, Counters())
            for policy_id in self.policies
        }
        sample = self.sampler.sample(self.policies, acting, steps)
        if (step := self.sampler.traced(sample)) is not None:
            self.left = [*self.left, action_trace.encode(step)][-step.fragments :]
        rows = len(next(iter(sample.columns.values()))["reward"])
        sent = Fragment(self.header(sample, rows), sample.columns)
        fragment.check(sent, "run", self.description, self.config.state_sizes)
        received = fragment.decode(fragment.encode(sent))
        fragment.check(received, "run", self.description, self.config.state_sizes)
        assert same(received, sample)
        return sample

    def header(self, sample: Sample, steps: int) -> FragmentHeader:
        return FragmentHeader(
            "run", "worker-0", 0, 0, Phase.TRAIN, dict.fromkeys(self.policies, 0), steps,
            self.config.environment.num_envs, sample.episodes,
        )  # fmt: skip


def same(one: Sample | Fragment, other: Sample) -> bool:
    return all(
        array.tobytes() == other.columns[policy][name].tobytes() and array.dtype == other.columns[policy][name].dtype
        for policy, columns in one.columns.items()
        for name, array in columns.items()
    ) and (isinstance(one, Fragment) or one.episodes == other.episodes)
