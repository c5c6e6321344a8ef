"""The store: a flat space of named byte objects, on any S3 API or in a folder.

Reads and writes are whole objects. Every failure is a named error: `ObjectMissing`, `StoreError` (one request failed
after its bounded retries), or `StoreUnavailable`; after that the same store object works again once the cause is
mended.
"""

import errno
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from pydantic import ValidationError

from stagecoach.shared.base.address import Address
from stagecoach.shared.base.errors import DeletionRefused, ObjectMissing, StoreError, StoreUnavailable, UserError
from stagecoach.shared.base.local_disk import TEMPORARY, folders_of, replacing, sync, unwritten
from stagecoach.shared.config.run_config import Config
from stagecoach.shared.config.services import StoreConfig
from stagecoach.shared.storage.s3_store import S3Store, s3_client

_ACCESS = ("endpoint_url", "region", "addressing_style", "ca_file")
"""Fields of the store's section that say how a bucket is reached."""


class ObjectStore(Protocol):
    """Operations of both implementations of the store."""

    def check(self) -> None:
        """Raises `StoreUnavailable` unless the store answers, accepts the credentials and has the bucket."""

    def get(self, key: str) -> bytes:
        """The object's bytes; raises `ObjectMissing`."""

    def put(self, key: str, data: bytes) -> None:
        """Writes the whole object, in the place of one that is there."""

    def delete(self, key: str) -> None:
        """Removes the object; one that is not there is not an error. Raises `DeletionRefused` if nothing can be."""

    def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly below `prefix` (which ends with a slash), sorted."""

    def keys(self, prefix: str) -> list[str]:
        """All keys that start with `prefix`, sorted."""


class FileStore:
    """A folder. Writes go to a temporary name first, are synced, then renamed: never half an object."""

    def __init__(self, root: Path, run_id: str) -> None:
        self._root = root
        self._folder = root / run_id

    def check(self) -> None:
        self._check_root()
        if not os.access(self._root, os.R_OK | os.W_OK | os.X_OK):
            raise StoreUnavailable(f"the store folder {self._root} cannot be written; check its permissions")

    def get(self, key: str) -> bytes:
        with self._named(f"reading {key} from"):
            try:
                return self._path(key).read_bytes()
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                self._check_root()
                raise ObjectMissing(f"no object {key} in {self._folder}") from None

    def put(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with self._named(f"writing {key} to"):
            self._check_root()
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(data)
            sync(folders_of(path, self._root))

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._named(f"deleting {key} from"):
            self._check_root()
            try:
                path.unlink(missing_ok=True)
            except PermissionError as error:
                raise DeletionRefused(f"deleting {key} from {self._folder} is refused: {error.strerror}") from None
            for folder in path.parents:
                if folder == self._folder or not _remove_leftovers(folder, deep=folder == path.parent):
                    return

    def folders(self, prefix: str) -> list[str]:
        with self._named(f"listing {prefix} of"):
            self._check_root()
            try:
                found = list(self._path(prefix).iterdir())
            except (FileNotFoundError, NotADirectoryError):  # not there, or deleted meanwhile
                return []
            return sorted(item.name for item in found if item.is_dir())

    def keys(self, prefix: str) -> list[str]:
        with self._named(f"listing {prefix} of"):
            self._check_root()
            files = (Path(parent, name) for parent, _, names in _walk(self._folder) for name in names)
            found = (path for path in files if not path.name.startswith(TEMPORARY))
            names = (path.relative_to(self._folder).as_posix() for path in found)
            return sorted(name for name in names if name.startswith(prefix))

    def _check_root(self) -> None:
        """Raises if the folder does not exist; never creates it, since it may not be mounted."""
        if not self._root.is_dir():
            raise StoreUnavailable(f"the store folder {self._root} is not there; create it or correct store.url")

    @contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            why = unwritten(str(error.strerror), str(self._root)) if full else str(error)
            raise StoreError(f"{doing} {self._folder} failed: {why}") from None

    def _path(self, key: str) -> Path:
        path = self._folder / key
        if ".." in path.parts or not path.is_relative_to(self._folder):
            raise StoreError(f"key {key!r} leaves the store folder")
        return path


def _walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walks a folder as `os.walk` does; raises if a part of it cannot be read, which rglob would skip."""

    def failed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # deleted meanwhile, or no run yet
            raise error

    return os.walk(folder, onerror=failed)


def _remove_leftovers(folder: Path, deep: bool) -> bool:
    """Removes a folder without objects, with temporary files of killed writers; returns whether it is gone. Folders in
    it are removed with `deep`, else they keep it."""
    below = ((parent, (*folders, *files)) for parent, folders, files in _walk(folder))
    found = [Path(parent, name) for parent, names in (below if deep else itertools.islice(below, 1)) for name in names]
    if not all(path.name.startswith(TEMPORARY) or (deep and path.is_dir()) for path in found):
        return False
    for path in sorted(found, reverse=True):  # what is below first
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
    if folder.is_dir():
        folder.rmdir()
    return True


def open_store(address: Address, config: Config) -> ObjectStore:
    """Returns the run's store, below `<prefix>/<run_id>/`, without contacting it: call `check`."""
    return _open(address, config.store)


def open_folder(
    location: str, endpoint_url: str | None = None, access: StoreConfig | None = None
) -> tuple[ObjectStore, str]:  # fmt: skip
    """Returns the store and id of the run in a folder (a path, `file://…`, `s3://…`); raises `UserError`.

    `access` is how a bucket is reached, by default as `access_at` returns.
    """
    scheme, separator, rest = location.partition("://")
    if not separator or scheme == "file":
        folder = Path(rest if separator else location).expanduser().resolve()
        return FileStore(folder.parent, folder.name), folder.name
    base, _, run_id = rest.rstrip("/").rpartition("/")
    if scheme != "s3" or not base:
        raise UserError(f"expected a run's folder (a path, file:///… or s3://bucket/prefix/run), found {location!r}")
    access = access or access_at(endpoint_url)
    return _open(Address(run_id, "", f"s3://{base}", access.endpoint_url), access), run_id


def access_at(endpoint_url: str | None) -> StoreConfig:
    """Returns how to reach a bucket without a config: by an endpoint and the variables STAGECOACH__STORE__…"""
    values = {name: os.environ.get(f"STAGECOACH__STORE__{name.upper()}") for name in _ACCESS}
    values["endpoint_url"] = endpoint_url or values["endpoint_url"]
    try:
        return StoreConfig.model_validate({name: value for name, value in values.items() if value})
    except ValidationError as error:
        raise UserError(f"STAGECOACH__STORE__…: {error.errors()[0]['msg']}") from None


def _open(address: Address, config: StoreConfig) -> ObjectStore:
    parts = urlsplit(address.store_url)
    if parts.scheme == "file":
        return FileStore(Path(parts.path), address.run_id)
    where = f"s3://{parts.netloc} at {address.endpoint_url or 'AWS'}"
    base = f"{parts.path.strip('/')}/{address.run_id}/".lstrip("/")
    folder = Path(address.store_folder, parts.netloc) if address.store_folder else None
    return S3Store(parts.netloc, base, lambda: s3_client(address, config), where, folder)
