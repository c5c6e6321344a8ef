"""A run's checkpoints: what `Run` does with them."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from stagecoach.coordinator.catalog import checkpoint_operations as operations
from stagecoach.coordinator.catalog.checkpoint_lookup import Evaluation, evaluate, named_code, require_trust
from stagecoach.coordinator.catalog.checkpoint_operations import Removed
from stagecoach.coordinator.catalog.run_folder import RunFolder
from stagecoach.coordinator.run_access.run_connection import RunConnection
from stagecoach.coordinator.run_access.summary import BestCheckpoint, best_checkpoint
from stagecoach.shared.base.errors import CheckpointNotFound, PolicyKindUnknown, UserError
from stagecoach.shared.base.user_code import extend_imports
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.deployment.deployed_policy import DeployedPolicy, load_policy
from stagecoach.shared.policies.registry import import_policies
from stagecoach.shared.storage.checkpoint_store import CheckpointStore
from stagecoach.shared.storage.players import read_mean
from stagecoach.trainer_node.checkpointing.verification import Verdict, promote, verify, withdraw
from stagecoach.trainer_node.export import Export


class RunCheckpoints:
    """The part of `Run` that reads and changes its checkpoints."""

    def __init__(self, folder: RunFolder, config: Config) -> None:
        self.run_id, self.folder, self.config = folder.run_id, folder, config
        self._at = RunConnection(folder, config)

    @property
    def live(self) -> bool:
        """True while a coordinator supervises the run, here or on another machine."""
        return self._at.live

    def checkpoints(self) -> list[dict[str, Any]]:
        """Lists the kept checkpoints: `[one["name"] for one in run.checkpoints()]`.

        Returns:
            Oldest first: name, steps, mean return, evaluation, size, and their marks.
        """
        return self._at.read(lambda _, store: operations.list_checkpoints(store))

    @property
    def best(self) -> BestCheckpoint | None:
        """The best checkpoint so far; None before an evaluation was confirmed.

        To compare three learning rates:

            scores = {}
            for rate in (0.0003, 0.001, 0.003):
                run = Run.start(load_config("config.yaml", [f"algorithm.learning_rate={rate}"]), inline=True)
                run.wait()
                scores[rate] = run.best.score
            print(max(scores, key=scores.get))
        """
        return best_checkpoint(self.checkpoints(), self.store_location)

    def policy(
        self, checkpoint: str | None = None, policy_id: str = "default", *, trust_config: bool = False
    ) -> DeployedPolicy:  # fmt: skip
        """Loads a policy that acts: `run.policy("best").act(observation)`.

        Args:
            checkpoint: A name, `best`, `final`, `promoted` or `latest`; else the promoted, best or newest one.
            policy_id: One of several policies, or `mean`, the mean strategy of its snapshots.
            trust_config: Lets a config from another machine name a network's class to import, as in `export`.

        Returns:
            The policy, on the CPU.

        Raises:
            CheckpointNotFound: The run has no checkpoint or policy of that name, or no checkpoint yet.
        """

        def read(_: object, store: CheckpointStore) -> DeployedPolicy:
            loaded = store.load(store.preferred(checkpoint), only="policy.safetensors")
            data = loaded.objects.get(f"{policy_id}/policy.safetensors")
            if data is None:
                data = read_mean(store, loaded.manifest.name, policy_id)
            if data is None:
                raise CheckpointNotFound(f"{loaded.manifest.name} has no policy {policy_id!r}")
            with suppress(PolicyKindUnknown):
                return load_policy(data)
            self._import_classes(trust_config)
            return load_policy(data)

        return self._at.read(read)

    @property
    def store_location(self) -> str:
        """Location of the run's checkpoints for display: a folder or a URL."""
        url = self.folder.offline_address(self.config).store_url
        if self.config.store.url == "embedded":
            url = url.removeprefix("file://")
        return f"{url.rstrip('/')}/{self.run_id}"

    def checkpoint_store(self) -> CheckpointStore:
        """Opens the run's checkpoints for reading."""
        return self.folder.checkpoint_store(self.config)

    def verify(self, checkpoint: str | None = None) -> list[Verdict]:
        """Reads and checks every byte of checkpoints: `run.verify("best")`.

        Args:
            checkpoint: A name or mark; None for all checkpoints.

        Returns:
            Name, state and problems of each.
        """
        return self._at.read(lambda _, store: verify(store, checkpoint, live=self.live))

    def promote(self, checkpoint: str | None) -> str | None:
        """Marks a checkpoint for deployment, if it is whole and its weights are finite: `run.promote("best")`.

        It is never pruned then, and `policy` and `evaluate` take it first.

        Args:
            checkpoint: A name or mark; None clears the mark.

        Returns:
            The checkpoint's name; with None, the name that had the mark.

        Raises:
            CheckpointNotFound: The checkpoint is missing.
            CheckpointDamaged: The checkpoint is incomplete or damaged.
        """
        if checkpoint is None:
            return self._at.read(lambda _, store: withdraw(store))
        return self._at.read(lambda _, store: promote(store, checkpoint, live=self.live).checkpoint)

    def _prepare_imports(self, trust_config: bool) -> None:
        """Lets the run's own modules be imported; raises `UserError` without trust."""
        require_trust(self.config, self.folder.made_here, trust_config, f"run {self.run_id}")
        extend_imports((os.getcwd(), *self.folder.import_path()))

    def _import_classes(self, trust_config: bool) -> None:
        """Imports the user's own algorithms and networks with their kinds; raises `UserError` without trust."""
        if any("algorithm" in field or "network" in field for field in named_code(self.config)):
            self._prepare_imports(trust_config)
            import_policies(self.config.policies, self.config.algorithm)

    def export(self, directory: str | Path, checkpoint: str | None = None, *, trust_config: bool = False) -> Path:
        """Copies a checkpoint to `directory/<run id>/`: `run.export("exported", "best")`.

        Args:
            directory: Folder that holds the copy.
            checkpoint: A name or mark; else the promoted, best or newest one.
            trust_config: Lets a config from another machine name code to import.

        Returns:
            The copy's folder, for `load_policy`.
        """
        self._import_classes(trust_config)
        return operations.export(self.checkpoint_store(), self.config, checkpoint, Path(directory))

    def export_onnx(
        self, directory: str | Path, checkpoint: str | None = None, *, trust_config: bool = False
    ) -> tuple[Export, dict[str, Path]]:  # fmt: skip
        """Writes a checkpoint's policies as ONNX files: `run.export_onnx("exported")`; needs the extra `onnx`.

        Args:
            directory: A new folder.
            checkpoint: A name or mark; else the promoted, best or newest one.
            trust_config: Lets a config from another machine name code to import.

        Returns:
            How the files compare with PyTorch, and the file of each policy.
        """
        self._import_classes(trust_config)
        return operations.export_onnx(self.checkpoint_store(), self.config, checkpoint, Path(directory))

    def prune(
        self, keep_last: int | None = None, keep_best: int | None = None, keep_every: int | None = None, *,
        dry_run: bool = False,
    ) -> list[Removed]:  # fmt: skip
        """Removes the checkpoints of an ended run that are not to be kept: `run.prune(keep_last=1, dry_run=True)`.

        The newest, best, final and promoted checkpoints always stay.

        Args:
            keep_last: Number of the newest to keep; this and the next two default to the config's.
            keep_best: Number of the best to keep.
            keep_every: Keeps each checkpoint whose number is a multiple.
            dry_run: Only say what would be removed.

        Returns:
            What was, or would be, removed.

        Raises:
            UserError: The run is live, or a number is below 1.
        """
        given = {"keep_last": keep_last, "keep_best": keep_best, "keep_every": keep_every}
        changes = {name: value for name, value in given.items() if value is not None}
        if low := [f"{name}={value}" for name, value in changes.items() if value < 1]:
            raise UserError(f"{', '.join(low)}: expected at least 1")
        if self.live:
            raise UserError(
                f"run {self.run_id!r} is live, and its trainer prunes by itself after each checkpoint "
                f"(checkpoint.keep_last, keep_best, keep_every); prune it when it has ended"
            )
        rule = self.config.checkpoint.model_copy(update=changes)
        with self.folder.locked():
            return operations.prune_checkpoints(self.checkpoint_store(), rule, dry_run=dry_run)

    def evaluate(
        self, checkpoint: str | None = None, episodes: int | None = None, video: str | Path | None = None, *,
        environment: Any = None, trust_config: bool = False,
    ) -> Evaluation:  # fmt: skip
        """Plays a checkpoint as `stagecoach evaluate` does: `run.evaluate("best", 20).scores["mean_return"]`.

        Args:
            checkpoint: A name or mark; else the promoted, best or newest one.
            episodes: Number of episodes, by default `evaluation.episodes`.
            video: Folder for an MP4 of each episode.
            environment: The object of a run whose environment is one, by default that of this handle.
            trust_config: Lets a config from another machine name code to import.

        Returns:
            The checkpoint's name, its scores, and the videos.
        """
        found = environment or self.config.environment.given_object
        target = self.run_id if checkpoint is None else f"{self.run_id}/{checkpoint}"
        runs_dir = self.folder.path.parent
        return evaluate(target, runs_dir, episodes, video, trust_config=trust_config, environment=found)
