"""The store: a flat space of named byte objects, on any S3 API or in a folder.

Reads and writes are whole objects. Nothing relies on the value of an ETag, on locks, or on listing being cheap. Every
failure is a named error: `ObjectMissing`, `StoreError` (one request failed after its bounded
retries), or `StoreUnavailable` (unreachable, refused, no such bucket). The same store object goes on once what was
wrong is mended: renewed credentials are read again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import boto3
import botocore.config
import botocore.exceptions
import botocore.session

from shared import tls
from shared.config import Config
from shared.connection import Address, s3_keys
from shared.errors import (
    CredentialsRefused,
    ObjectMissing,
    StoreError,
    StoreUnavailable,
    UserError,
)
from shared.full_disk import lacks_room, unwritten
from shared.s3_errors import FAILURES, Request, named, not_s3
from shared.services_config import StoreConfig

_TEMPORARY = ".partial-"
_READ_TRIES = 12
_PROOF = {"get_object": "ETag", "put_object": "ETag", "list_objects_v2": "IsTruncated"}
"""What every S3 server answers to these, and a web page that answers 200 in its place does not."""
_LENGTH = {"content-length", "transfer-encoding"}
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}


class ObjectStore(Protocol):
    """Both implementations of the store."""

    def check(self) -> None:
        """Raises `StoreUnavailable` unless the store answers, accepts the credentials and has the bucket."""
        ...

    def get(self, key: str) -> bytes:
        """The object's bytes; raises `ObjectMissing`."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Writes the whole object, in the place of one that is there."""
        ...

    def delete(self, key: str) -> None:
        """Removes the object; one that is not there is not an error."""
        ...

    def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly below `prefix` (which ends with a slash), sorted."""
        ...

    def keys(self, prefix: str) -> list[str]:
        """All keys that start with `prefix`, sorted."""
        ...


class S3Store:
    """An S3 bucket, below a prefix. The client is made when it is needed, and anew when its credentials are refused.

    `folder` is where a server on this machine keeps the bucket that leaves it to the kernel when to write: an object is
    synced there once it is put, since what it makes superfluous (the log) may be gone from the disk a moment later.
    """

    def __init__(
        self, bucket: str, prefix: str, make_client: Callable[[], Any], where: str, folder: Path | None = None
    ) -> None:
        self._bucket = bucket
        self._folder = folder
        self._prefix = prefix
        self._make_client = make_client
        self._client: Any = None
        self._where = where

    def check(self) -> None:
        try:  # a listing, since the answer to HEAD cannot say what is wrong
            self._call("list_objects_v2", None, Prefix=self._prefix + ".check", Delimiter="/", MaxKeys=1)
        except StoreError as error:
            endpoint = urlsplit(self._client.meta.endpoint_url if self._client is not None else "")
            if endpoint.scheme == "http" and tls.speaks_tls(endpoint.hostname or "", endpoint.port or 80):
                raise StoreUnavailable(f"{self._where} speaks TLS; begin store.endpoint_url with https://") from None
            advice = "" if "store.url" in str(error) else "; correct store.url, or see to the server"
            raise StoreUnavailable(f"{error}{advice}") from None

    def get(self, key: str) -> bytes:
        broken = ""
        for attempt in range(_READ_TRIES):  # boto3 retries a request, but not a body that breaks off
            if attempt:
                time.sleep(0.02 * attempt)
            answer = self._call("get_object", key)
            if not _LENGTH & answer["ResponseMetadata"]["HTTPHeaders"].keys():
                broken = "the server does not say how long it is"
                continue
            try:
                return bytes(answer["Body"].read())
            except FAILURES as error:
                broken = str(error)
        raise StoreError(f"reading {key} from {self._where} broke off {_READ_TRIES} times: {broken}")

    def put(self, key: str, data: bytes) -> None:
        try:
            self._call("put_object", key, Body=data)
        except StoreError as error:  # an S3 server does not say why it fails
            if self._folder is None or (why := lacks_room(self._folder, len(data))) is None:
                raise
            raise StoreError(f"{error}; {why}") from None
        if self._folder is not None:
            try:
                _sync(self._folder / (self._prefix + key), self._folder)
            except OSError as error:
                raise StoreError(f"{key} may not be on the disk of {self._where}: {error}") from None

    def delete(self, key: str) -> None:
        try:
            self._call("delete_object", key)
        except ObjectMissing:
            return

    def folders(self, prefix: str) -> list[str]:
        names = []
        for page in self._pages(prefix, Delimiter="/"):
            names += [item["Prefix"].rstrip("/").rpartition("/")[2] for item in page.get("CommonPrefixes", [])]
        return sorted(names)

    def keys(self, prefix: str) -> list[str]:
        found = []
        for page in self._pages(prefix):
            found += [item["Key"].removeprefix(self._prefix) for item in page.get("Contents", [])]
        return sorted(found)

    def _pages(self, prefix: str, **more: Any) -> list[dict[str, Any]]:
        pages: list[dict[str, Any]] = []
        token: dict[str, str] = {}
        while True:
            page = self._call("list_objects_v2", None, Prefix=self._prefix + prefix, **more, **token)
            pages.append(page)
            if not page.get("IsTruncated"):
                return pages
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def _call(self, operation: str, key: str | None = None, **arguments: Any) -> Any:
        request = Request(operation, key, self._bucket, self._where)
        if key is not None:
            arguments["Key"] = self._prefix + key
        try:
            client = self._client = self._client or self._make_client()
            answer = getattr(client, operation)(Bucket=self._bucket, **arguments)
        except FAILURES as error:
            raised = named(error, request)
            if isinstance(raised, CredentialsRefused):
                self._client = None  # a client keeps the credentials it was made with; they may be renewed by now
            raise raised from None
        if _PROOF.get(operation, "ResponseMetadata") not in answer:
            raise not_s3(request)
        return answer


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
            self._write(path, data)

    def delete(self, key: str) -> None:
        path = self._path(key)
        with self._named(f"deleting {key} from"):
            self._check_root()
            path.unlink(missing_ok=True)
            for folder in path.parents:
                if folder == self._folder or not _remove_leftovers(folder, deep=folder == path.parent):
                    return

    def folders(self, prefix: str) -> list[str]:
        with self._named(f"listing {prefix} of"):
            self._check_root()
            path = self._path(prefix)
            return sorted(item.name for item in path.iterdir() if item.is_dir()) if path.is_dir() else []

    def keys(self, prefix: str) -> list[str]:
        with self._named(f"listing {prefix} of"):
            self._check_root()
            found = (path for path in _files(self._folder) if not path.name.startswith(_TEMPORARY))
            names = (path.relative_to(self._folder).as_posix() for path in found)
            return sorted(name for name in names if name.startswith(prefix))

    def _write(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, _FILE_MODE)
            os.replace(temporary, path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
        for folder in _up_to(self._root, path):
            _sync_one(folder)

    def _check_root(self) -> None:
        """The folder is never made here: where it is not mounted, what was there would seem lost, not away."""
        if not self._root.is_dir():
            raise StoreUnavailable(f"the store folder {self._root} is not there; create it or correct store.url")

    @contextlib.contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = unwritten(str(error.strerror), str(self._root)) if error.errno in _DISK_FULL else str(error)
            raise StoreError(f"{doing} {self._folder} failed: {why}") from None

    def _path(self, key: str) -> Path:
        path = self._folder / key
        if ".." in path.parts or not path.is_relative_to(self._folder):
            raise StoreError(f"key {key!r} leaves the store folder")
        return path


def _files(folder: Path) -> Iterator[Path]:
    """All files below a folder; raises where a part of it cannot be read (rglob would leave that out in silence)."""

    def failed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # deleted meanwhile, or no run yet
            raise error

    for parent, _, names in os.walk(folder, onerror=failed):
        yield from (Path(parent, name) for name in names)


def _remove_leftovers(folder: Path, deep: bool) -> bool:
    """Removes a folder that holds no object (any more), with what killed writers left in it; whether it is gone.

    With `deep` the same below it, else folders below it keep it.
    """
    found = list(folder.rglob("*") if deep else folder.iterdir()) if folder.is_dir() else []
    if not all(path.name.startswith(_TEMPORARY) or (deep and path.is_dir()) for path in found):
        return False
    for path in sorted(found, reverse=True):  # what is below first
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
    if folder.is_dir():
        folder.rmdir()
    return True


def _sync(path: Path, root: Path) -> None:
    """The file, and its name; where it has been deleted meanwhile there is nothing to keep."""
    with contextlib.suppress(FileNotFoundError):
        for found in (path, *_up_to(root, path)):
            _sync_one(found)


def _up_to(root: Path, path: Path) -> list[Path]:
    """The folders of `path`, through `root`: a name outlives a power failure only once its folder is on the disk."""
    return [folder for folder in path.parents if folder.is_relative_to(root)]


def _sync_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


_FILE_MODE = 0o666 & ~_umask()
"""Asked once: the umask belongs to the whole process, and can only be read by changing it."""


def open_store(address: Address, config: Config) -> ObjectStore:
    """The run's store, below `<prefix>/<run_id>/`. Nothing is contacted yet: call `check`."""
    return _open(address, config.store)


def open_folder(location: str, endpoint_url: str | None = None) -> tuple[ObjectStore, str]:
    """The store of one run, and its id, where a person names the run's folder: a path, `file://…` or `s3://…`.

    Raises `UserError` for anything else; nothing is contacted yet.
    """
    scheme, separator, rest = location.partition("://")
    if not separator or scheme == "file":
        folder = Path(rest if separator else location).expanduser().resolve()
        return FileStore(folder.parent, folder.name), folder.name
    base, _, run_id = rest.rstrip("/").rpartition("/")
    if scheme != "s3" or not base:
        raise UserError(f"expected a run's folder (a path, file:///… or s3://bucket/prefix/run), found {location!r}")
    return _open(Address(run_id, "", f"s3://{base}", endpoint_url), StoreConfig()), run_id


def _open(address: Address, config: StoreConfig) -> ObjectStore:
    parts = urlsplit(address.store_url)
    if parts.scheme == "file":
        return FileStore(Path(parts.path), address.run_id)
    prefix = parts.path.strip("/")
    where = f"s3://{parts.netloc} at {address.endpoint_url or 'AWS'}"
    base = f"{prefix}/{address.run_id}/" if prefix else f"{address.run_id}/"
    folder = Path(address.store_folder, parts.netloc) if address.store_folder else None
    return S3Store(parts.netloc, base, lambda: s3_client(address, config), where, folder)


def s3_client(address: Address, config: StoreConfig) -> Any:
    """One boto3 client, made once and kept: it renews its own credentials. Raises `StoreUnavailable`.

    The embedded server has credentials of its own: profiles and proxies of the environment are not for it.
    """
    access_key, secret_key = s3_keys(address)
    timeout, embedded = config.timeout_seconds, access_key is not None
    variables: Any = {"profile": (None, None, None, None)} if embedded else None
    try:
        tls.check_files("store", config.ca_file)
        session = boto3.session.Session(botocore_session=botocore.session.Session(session_vars=variables))
        return session.client(
            "s3",
            endpoint_url=address.endpoint_url,
            region_name=config.region,
            verify=str(config.ca_file) if config.ca_file else None,
            aws_access_key_id=access_key,
            aws_secret_access_key=secret_key,
            config=botocore.config.Config(
                connect_timeout=timeout,
                read_timeout=timeout,
                retries={"total_max_attempts": config.retries + 1, "mode": "standard"},
                s3={"addressing_style": "path" if address.endpoint_url else "auto"},
                proxies={} if embedded else None,
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise StoreUnavailable(
            f"{address.store_url} cannot be used: {error}; correct store.url or the AWS settings"
        ) from None
