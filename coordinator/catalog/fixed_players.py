"""Resolution of a league's fixed players before a run starts: kind, seats and bytes of each source.

The run's config records them, and thus its store and its hash: a resume has the same players.
"""

import contextlib
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from stagecoach.coordinator.catalog.checkpoint_lookup import Found, find_checkpoint
from stagecoach.shared.base.errors import CheckpointError, ConfigError, RunNotFound, SharedObjectUnusable, UserError
from stagecoach.shared.base.user_code import import_object, install, misfit
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.services import StoreConfig
from stagecoach.shared.experience.mixture import decode_mixture, is_mixture
from stagecoach.shared.experience.spaces import EnvironmentDescription, PolicySpaces
from stagecoach.shared.league.table import PlayerRef, kind_of, player_hash
from stagecoach.shared.policies.serialization import decode_policy
from stagecoach.shared.storage.checkpoint_store import Checkpoint
from stagecoach.shared.storage.object_store import ObjectStore
from stagecoach.shared.storage.players import LEAGUE, MEAN, named_so, read_mean, snapshots_in
from stagecoach.shared.storage.shared_objects import read_shared_object, write_shared_object
from stagecoach.trainer_node.state.snapshot import POLICY

_POLICY_FILE = "policy.safetensors"
Players = Mapping[str, bytes]
"""Bytes of `league.fixed` by SHA-256, read once: the source may be a live run, whose newest checkpoint changes."""
NO_PLAYERS: Players = MappingProxyType({})


def with_fixed_players(
    config: Config, description: EnvironmentDescription, before: Config | None = None
) -> tuple[Config, Players]:
    """Resolves `league.fixed`; returns the config with the results, and the bytes read.

    A player that the run's earlier config `before` resolved stays the same, whatever happened to its source. A new run
    resolves all, even if its config has results, which may be another run's.

    Raises:
        ConfigError: a player cannot be resolved, or fits no seat.
    """
    if config.league is None or not config.league.fixed:
        return config, NO_PLAYERS
    read: dict[str, bytes] = {}
    fixed, then = dict(config.league.fixed), before.league.fixed if before and before.league else {}
    for name, player in fixed.items():
        known = then.get(name)
        if known is not None and known.kind and known.source == player.source and player.sha256 in ("", known.sha256):
            if known.kind == "function":  # checked again: its code may be gone
                _check_function(field := f"league.fixed.{name}", import_object(known.source, field, kind="function"))
            fixed[name] = player.model_copy(update={key: getattr(known, key) for key in ("kind", "sha256", "seats")})
            continue
        ref, data = find_player(f"league.fixed.{name}", player.source, config.runs_dir, description, config.store)
        if not ref.seats:
            raise ConfigError(
                f"league.fixed.{name}={player.source} was trained with other observation or action spaces than those "
                f"of {', '.join(sorted(set(description.agents.values())))}; name a player of this environment"
            )
        if player.sha256 not in ("", ref.sha256):
            raise ConfigError(_changed(name, player.source, player.sha256))
        fixed[name] = player.model_copy(update={"kind": ref.kind, "sha256": ref.sha256, "seats": ref.seats})
        read[ref.sha256] = data
    league = config.league.model_copy(update={"fixed": fixed})
    return config.model_copy(update={"league": league}), read


def fixed_sources(config: Config) -> list[str]:
    """Returns the sources of all fixed players."""
    return [player.source for player in config.league.fixed.values()] if config.league is not None else []


def store_players(store: ObjectStore, config: Config, read: Players, first: Checkpoint | None) -> None:
    """Copies the fixed players and the first snapshots of `first` into a new run's store.

    Reads players again that an earlier, interrupted start resolved; raises `ConfigError` if one has changed since.
    """
    for name, player in config.league.fixed.items() if config.league else ():
        if player.sha256:
            data = read.get(player.sha256)
            if data is None:
                data = read_player(f"league.fixed.{name}={player.source}", player.source, config.runs_dir, config.store)
            if player_hash(data) != player.sha256:
                raise ConfigError(_changed(name, player.source, player.sha256))
            write_shared_object(store, data)
    if first is not None:
        for policy_id in sorted(learner.policy for learner in config.league_learners.values()):
            write_shared_object(store, first.objects[POLICY.format(policy_id)])


def _changed(name: str, source: str, sha256: str) -> str:
    return (
        f"league.fixed.{name}={source} has changed since the config was written (SHA-256 {sha256}); name the "
        f"original checkpoint, or remove sha256 from the config"
    )


def find_player(
    name: str, source: str, runs_dir: Path, description: EnvironmentDescription, access: StoreConfig | None = None
) -> tuple[PlayerRef, bytes]:  # fmt: skip
    """Resolves a source to a player with the seats that it fits, and its bytes (empty if random or scripted).

    `name` is the field of the config, or empty. Raises `ConfigError` if the player cannot be resolved.
    """
    field, kind = f"{name}={source}" if name else source, kind_of(source)
    every = tuple(sorted(set(description.agents.values())))
    if kind == "function":
        _check_function(field, import_object(source, name or "a player", kind="function"))
    if kind in ("random", "function"):
        return PlayerRef(kind, "", source, every), b""
    data = read_player(field, source, runs_dir, access)
    kind = "mixture" if kind == "policy" and is_mixture(data) else kind
    fits = _onnx_fits if kind == "onnx" else _policy_fits
    seats = tuple(seat for seat in every if fits(field, data, description.policies[seat]))
    return PlayerRef(kind, player_hash(data), source, seats), data


def _check_function(field: str, function: object) -> None:
    """Raises `ConfigError` if the function cannot be called as a scripted player."""
    expected = "expected one that returns an action for an observation and a random generator"
    if not callable(function):
        raise ConfigError(f"{field} is not a function; {expected}")
    if why := misfit(function, None, None):
        raise ConfigError(f"{field} cannot be called with two arguments: {why}; {expected}")


def read_player(field: str, source: str, runs_dir: Path, access: StoreConfig | None) -> bytes:
    try:
        if kind_of(source) == "onnx":
            return Path(source).expanduser().read_bytes()
        target, _, policy_id = source.partition("#")
        found = find_checkpoint(target, runs_dir, access)
        objects = found.store.load(found.name, only=_POLICY_FILE).objects
    except OSError as error:
        raise ConfigError(f"{field} cannot be read: {error.strerror}; expected an ONNX file") from None
    except RunNotFound as error:
        raise ConfigError(f"{field}: {error}; a scripted player is module:function") from None
    except (CheckpointError, UserError) as error:
        raise ConfigError(f"{field}: {error}") from None
    policies = {key.partition("/")[0]: data for key, data in objects.items()}
    if policy_id in policies or (not policy_id and len(policies) == 1):
        return policies[policy_id or next(iter(policies))]
    try:
        player = read_mean(found.store, found.name, policy_id)
    except (CheckpointError, SharedObjectUnusable) as error:
        raise ConfigError(f"{field}: {error}") from None
    if player is None and (player := read_snapshot(field, found, policy_id)) is None:
        what = f"no policy {policy_id!r}" if policy_id else "several policies"
        means = " or ".join(f"{target}#{name}-{MEAN}" for name in sorted(policies))
        listed = f"a snapshot that `stagecoach league {found.store.run_id}` lists, or a mean strategy ({means})"
        named = f"{target}#{' or #'.join(sorted(policies))}{f', or {listed}' if found.config.league else ''}"
        raise ConfigError(f"{field}: {found.name} has {what}; choose one: {named}")
    return player


def read_snapshot(field: str, found: Found, player: str) -> bytes | None:
    """Reads a league's snapshot by the player's id or a unique prefix of it.

    Searches from the newest checkpoint to the oldest, since players leave the league. Raises `ConfigError` if the
    prefix is ambiguous or the store no longer has the snapshot.
    """
    for name in dict.fromkeys((*reversed(found.store.names()), found.name)) if "-" in player else ():
        snapshots: dict[str, str] = {}
        with contextlib.suppress(CheckpointError, ValueError, KeyError):
            snapshots = snapshots_in(found.store.load(name, only=LEAGUE).objects[LEAGUE])
        if its := named_so(player, snapshots):
            if len(its) > 1:
                raise ConfigError(f"{field} matches {', '.join(its)}; give more of the name")
            try:
                return read_shared_object(found.store.store, snapshots[its[0]])
            except SharedObjectUnusable as error:
                raise ConfigError(f"{field}: {error}") from None
    return None


def _policy_fits(field: str, data: bytes, spaces: PolicySpaces) -> bool:
    try:
        first = decode_mixture(data)[0][0] if is_mixture(data) else data
        return decode_policy(first)[0].spaces.acting == spaces.acting
    except CheckpointError as error:
        raise ConfigError(f"{field}: {error}") from None


def _onnx_fits(field: str, data: bytes, spaces: PolicySpaces) -> bool:
    """Returns whether the spaces recorded in the ONNX file match."""
    if importlib.util.find_spec("onnxruntime") is None:
        raise ConfigError(f"{field} needs onnxruntime: {install('onnx')}")
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no common base
        raise ConfigError(f"{field} is not a valid ONNX file ({type(error).__name__})") from None
    told = session.get_modelmeta().custom_metadata_map.get("stagecoach.spaces", "{}")
    with contextlib.suppress(ValueError):
        return PolicySpaces.from_dict(json.loads(told)).acting == spaces.acting
    return False
