"""Episodes of a worker: resumed from its predecessor if possible, else new."""

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from stagecoach.rollout_worker.environments.factory import make_vector
from stagecoach.rollout_worker.environments.seeding import SeedLineage
from stagecoach.rollout_worker.gateway.environment import ExternalEnvironments
from stagecoach.rollout_worker.sampling import action_trace
from stagecoach.rollout_worker.sampling.action_trace import ActionTrace
from stagecoach.rollout_worker.sampling.dataset_sampler import DatasetSampler
from stagecoach.rollout_worker.sampling.director import Directors
from stagecoach.rollout_worker.sampling.sampler import Sampler
from stagecoach.rollout_worker.watchdog import Watchdog, WatchedEnvironment
from stagecoach.shared.base.errors import EnvironmentFailure, headline
from stagecoach.shared.base.printable import counted
from stagecoach.shared.base.stage_timer import StageTimer
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.datasets.recording import Recordings
from stagecoach.shared.experience.counters import Phase
from stagecoach.shared.experience.spaces import EnvironmentDescription
from stagecoach.shared.protocol.experience_log import ExperienceLog
from stagecoach.shared.runtime.restarts import RestartBound

_LOGGER = logging.getLogger("stagecoach.worker")
AnySampler: TypeAlias = Sampler | DatasetSampler


class Episodes:
    """Keeps the sampler of one incarnation, and restarts its environments when they raise."""

    def __init__(
        self, config: Config, description: EnvironmentDescription, log: ExperienceLog, lineage: SeedLineage, *,
        phase: Phase, recorded: Recordings | None, watchdog: Watchdog, stages: StageTimer, emit: Callable[[str], None],
        direct: Callable[[], Directors] = Directors, external: ExternalEnvironments | None = None,
    ) -> None:  # fmt: skip
        """Starts the environments at the end of the predecessor's last fragment if they can get there, else new
        episodes of `lineage`. `recorded` experience replaces them, perhaps only in warm-up. Raises `EnvironmentFailure`
        after more than `environment.failures_allowed` failures in a row."""
        self._config, self._description, self._log, self._records = config, description, log, recorded
        self._worker, self._phase = f"worker-{lineage.worker}", phase
        self._watchdog, self._stages, self._emit, self._direct = watchdog, stages, emit, direct
        self._external = external
        self._failures, self._fragments, self._tried = RestartBound(config.environment.failures_allowed), 0, False
        self._failures.record_progress((0,))
        self.sampler = self._first(lineage)

    def _first(self, lineage: SeedLineage) -> AnySampler:
        left = self._log.left(self._worker)
        if self._external is not None:  # the clients know where their episodes are
            return self._begin(lineage)
        if left.tries >= action_trace.MOST_TRIES:
            why = f"{left.tries} of its predecessors died in the old episodes"
        elif not left.pushed:  # nothing was pushed yet
            return self._begin(SeedLineage(lineage.seed, lineage.worker, 0, 0))
        elif (trace := action_trace.read(left.action_trace)) is None or not self._fits(trace):
            why = "its predecessor left no action trace (drained, a native environment, or rollout.catch_up_seconds)"
        elif (sampler := self._resume(trace)) is None:
            why = "its environment did not return to the same observations"
        else:
            return sampler
        self._emit(f"{self._worker} begins new episodes: {why}")
        return self._begin(lineage)

    def _fits(self, trace: ActionTrace) -> bool:
        fits = trace.fits(self._description, self._config.environment.num_envs)
        return fits and self._direct().accepts(trace.directed)

    def _resume(self, trace: ActionTrace) -> AnySampler | None:
        """Resumes the predecessor's episodes; returns None if the environments do not reach its position."""
        self._log.trying(self._worker, 1)
        try:
            sampler = self._make(trace.lineage, trace)
        except EnvironmentFailure as error:
            self._count_failure(error)
            return None
        self._log.trying(self._worker, -1)
        if sampler.position_digest == trace.digest:
            return sampler
        sampler.close()
        return None

    def _begin(self, lineage: SeedLineage) -> AnySampler:
        """Begins new episodes; restarts environments that raise in their first reset, as often as configured."""
        while True:
            try:
                return self._make(lineage)
            except EnvironmentFailure as error:
                self._count_failure(error)
                lineage = lineage.next()

    def _make(self, lineage: SeedLineage, trace: ActionTrace | None = None) -> AnySampler:
        config, recorded = self._config.environment, self._records
        if recorded is not None and (trace.digest == recorded.sha256 if trace else self._recorded(self._phase)):
            return DatasetSampler(recorded, self._description, config.num_envs, lineage, trace)
        directors = self._direct()
        if self._external is not None:
            self._external.sessions.parameters = directors.parameters
            device = self._config.rollout.device
            return Sampler(self._external, self._description, lineage, device, None, self._stages, directors)
        made = partial(make_vector, config, self._description, directors.parameters)
        environment = WatchedEnvironment(made, self._watchdog)
        try:
            environment.set_phase(self._phase)
            rows = self._config.fragment_rows if self._config.rollout.complete_episodes else 0
            device = self._config.rollout.device
            return Sampler(environment, self._description, lineage, device, trace, self._stages, directors, rows)
        except EnvironmentFailure:
            environment.close()
            raise

    def _recorded(self, phase: Phase) -> bool:
        dataset = self._config.dataset
        return dataset is not None and (not dataset.only_heatup or phase is Phase.HEATUP)

    def enter(self, phase: Phase) -> None:
        """Enters a phase. If recorded experience is only for warm-up, a new lineage begins in environments after it."""
        before, self._phase = self._phase, phase
        if isinstance(self.sampler, DatasetSampler) != self._recorded(phase):
            self.sampler.close()
            self.sampler = self._begin(self.sampler.lineage.next())
        elif phase is not before and isinstance(self.sampler, Sampler):
            self.sampler.set_phase(phase)

    def try_acting(self) -> None:
        """Counts a try before the first fragment, so that its position cannot kill every next incarnation."""
        if not self._tried:
            self._log.trying(self._worker, 1)
            self._tried = True

    def pushed(self) -> None:
        self._fragments += 1
        self._failures.record_progress((self._fragments,))

    def restart(self, error: EnvironmentFailure) -> None:
        """Restarts environments that have raised; raises the failure if that happens too often."""
        self._count_failure(error)
        self.sampler.close()
        self.sampler = self._begin(self.sampler.lineage.next())

    def _count_failure(self, error: EnvironmentFailure) -> None:
        _LOGGER.error("%s: %s", self._worker, error)
        what = f"{self._worker}: {headline(error)}"
        if self._failures.ended():
            raise EnvironmentFailure(
                f"{what}; {counted(self._failures.ends, 'failure')} in a row without a fragment between them, "
                f"environment.failures_allowed is {self._config.environment.failures_allowed}\n{error}"
            )
        self._emit(f"{what}; starting it again")

    def close(self) -> None:
        self.sampler.close()
