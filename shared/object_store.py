"""The store: a flat space of named byte objects, on any S3 API or in a folder.

Reads and writes are whole objects. Nothing relies on ETags, on locks, or on listing being cheap. Every failure is a
named error: `ObjectMissing`, `PreconditionFailed`, `StoreError` (one request failed after its bounded retries), or
`StoreUnavailable` (unreachable, refused, no such bucket).
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import boto3
import botocore.config
import botocore.exceptions
import botocore.session

from shared.config import Config
from shared.connection import Address, credentials
from shared.errors import ObjectMissing, PreconditionFailed, StoreError, StoreUnavailable

_TEMPORARY = ".partial-"
_READ_TRIES = 5


class ObjectStore(Protocol):
    """Both implementations of the store."""

    def check(self) -> None:
        """Raises `StoreUnavailable` unless the store answers, accepts the credentials and has the bucket."""
        ...

    def get(self, key: str) -> bytes:
        """The object's bytes; raises `ObjectMissing`."""
        ...

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        """Writes the whole object; with `if_absent` only where there is none (else `PreconditionFailed`)."""
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

    @property
    def conditional_writes(self) -> bool:
        """Whether `if_absent` is kept by the store itself (tried out once, not believed)."""
        ...


class S3Store:
    """An S3 bucket, below a prefix."""

    def __init__(self, bucket: str, prefix: str, client: Any, where: str) -> None:
        self._bucket = bucket
        self._prefix = prefix
        self._client = client
        self._where = where
        self._conditional: bool | None = None

    def check(self) -> None:
        try:
            self._call("head_bucket")
        except StoreError as error:
            raise StoreUnavailable(f"{error}; correct store.url, or see to the server") from None

    def get(self, key: str) -> bytes:
        broken = ""
        for attempt in range(
            _READ_TRIES
        ):  # boto3 retries a request, but not a body that breaks off (a replaced object)
            time.sleep(0.02 * attempt)
            answer = self._call("get_object", key)
            try:
                return bytes(answer["Body"].read())
            except (botocore.exceptions.BotoCoreError, botocore.exceptions.HTTPClientError, OSError) as error:
                broken = str(error)
        raise StoreError(f"reading {key} from {self._where} broke off {_READ_TRIES} times: {broken}")

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        if if_absent and self.conditional_writes:
            self._call("put_object", key, Body=data, IfNoneMatch="*")
        elif if_absent and self._exists(key):
            raise PreconditionFailed(f"{key} exists already in {self._where}")
        else:
            self._call("put_object", key, Body=data)

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

    @property
    def conditional_writes(self) -> bool:
        if self._conditional is None:
            probe = ".probe"
            self._call("put_object", probe, Body=b"probe")
            try:
                self._call("put_object", probe, Body=b"probe", IfNoneMatch="*")
                self._conditional = False
            except PreconditionFailed:
                self._conditional = True
            except StoreError:
                self._conditional = False  # a server that does not know the header at all
            self.delete(probe)
        return self._conditional

    def _exists(self, key: str) -> bool:
        try:
            self._call("head_object", key)
        except ObjectMissing:
            return False
        return True

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
        if key is not None:
            arguments["Key"] = self._prefix + key
        try:
            return getattr(self._client, operation)(Bucket=self._bucket, **arguments)
        except botocore.exceptions.ClientError as error:
            raise self._named(error, operation, key) from None
        except (botocore.exceptions.NoCredentialsError, botocore.exceptions.PartialCredentialsError):
            raise StoreUnavailable(
                f"{self._where}: no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
            ) from None
        except (botocore.exceptions.EndpointConnectionError, botocore.exceptions.ConnectTimeoutError) as error:
            raise StoreUnavailable(f"{self._where} does not answer ({error}); start it or correct store.url") from None
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.HTTPClientError) as error:
            raise StoreError(f"{operation} {key or ''} on {self._where} failed: {error}") from None

    def _named(self, error: botocore.exceptions.ClientError, operation: str, key: str | None) -> Exception:
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if code == "NoSuchBucket" or (operation == "head_bucket" and status == 404):
            return StoreUnavailable(
                f"{self._where}: there is no bucket {self._bucket!r}; create it or correct store.url"
            )
        if status == 412 or code in {"PreconditionFailed", "ConditionalRequestConflict"}:
            return PreconditionFailed(f"{key} exists already in {self._where}")
        if status in {401, 403}:
            return StoreUnavailable(
                f"{self._where} refuses the credentials ({code}); check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and "
                f"the bucket's policy"
            )
        if code in {"NoSuchKey", "404", "NotFound"} or status == 404:
            return ObjectMissing(f"no object {key} in {self._where}")
        return StoreError(f"{operation} {key or ''} on {self._where} failed: {code} (HTTP {status})")


class FileStore:
    """A folder. Writes go to a temporary name first, are synced, then renamed: never half an object."""

    conditional_writes = True

    def __init__(self, root: Path, run_id: str) -> None:
        self._root = root
        self._folder = root / run_id

    def check(self) -> None:
        if not self._root.is_dir():
            raise StoreUnavailable(f"the store folder {self._root} is not there; create it or correct store.url")
        if not os.access(self._root, os.R_OK | os.W_OK | os.X_OK):
            raise StoreUnavailable(f"the store folder {self._root} cannot be written; check its permissions")

    def get(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise ObjectMissing(f"no object {key} in {self._folder}") from None
        except OSError as error:
            raise StoreError(f"reading {key} from {self._folder} failed: {error}") from None

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        path = self._path(key)
        temporary = ""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, _FILE_MODE)
            if if_absent:
                os.link(temporary, path)
                os.unlink(temporary)
            else:
                os.replace(temporary, path)
            _sync_folder(path.parent)
        except OSError as error:
            if temporary:
                Path(temporary).unlink(missing_ok=True)
            if if_absent and path.exists():
                raise PreconditionFailed(f"{key} exists already in {self._folder}") from None
            raise StoreError(f"writing {key} to {self._folder} failed: {error}") from None

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            path.unlink(missing_ok=True)
            parent = path.parent
            while parent != self._folder and parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
                parent = parent.parent
        except OSError as error:
            raise StoreError(f"deleting {key} from {self._folder} failed: {error}") from None

    def folders(self, prefix: str) -> list[str]:
        path = self._path(prefix)
        return sorted(item.name for item in path.iterdir() if item.is_dir()) if path.is_dir() else []

    def keys(self, prefix: str) -> list[str]:
        found = (path for path in self._folder.rglob("*") if path.is_file() and not path.name.startswith(_TEMPORARY))
        names = (path.relative_to(self._folder).as_posix() for path in found)
        return sorted(name for name in names if name.startswith(prefix))

    def _path(self, key: str) -> Path:
        path = self._folder / key
        if ".." in path.parts or not path.is_relative_to(self._folder):
            raise StoreError(f"key {key!r} leaves the store folder")
        return path


def _sync_folder(folder: Path) -> None:
    """A rename outlives a power failure only once its folder is on the disk."""
    handle = os.open(folder, os.O_RDONLY)
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
    parts = urlsplit(address.store_url)
    if parts.scheme == "file":
        return FileStore(Path(parts.path), address.run_id)
    prefix = parts.path.strip("/")
    where = f"s3://{parts.netloc} at {address.endpoint_url or 'AWS'}"
    base = f"{prefix}/{address.run_id}/" if prefix else f"{address.run_id}/"
    return S3Store(parts.netloc, base, s3_client(address, config), where)


def s3_client(address: Address, config: Config) -> Any:
    """One boto3 client, made once and kept: it renews its own credentials. Raises `StoreUnavailable`.

    The embedded server has credentials of its own: profiles and proxies of the environment are not for it.
    """
    secret = credentials(address)
    timeout, embedded = config.store.timeout_seconds, secret.s3_access_key is not None
    variables: Any = {"profile": (None, None, None, None)} if embedded else None
    try:
        session = boto3.session.Session(botocore_session=botocore.session.Session(session_vars=variables))
        return session.client(
            "s3",
            endpoint_url=address.endpoint_url,
            region_name=config.store.region,
            aws_access_key_id=secret.s3_access_key,
            aws_secret_access_key=secret.s3_secret_key,
            config=botocore.config.Config(
                connect_timeout=timeout,
                read_timeout=timeout,
                retries={"total_max_attempts": config.store.retries + 1, "mode": "standard"},
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
