"""A bucket of any S3 server as the store; what the server, or the way to it, answers becomes a named error.

`StoreUnavailable` (and `CredentialsRefused`, `OperationRefused`) say what a person has to do; `StoreError` is what
passes by itself.
"""

import base64
import functools
import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.config
import botocore.exceptions as boto
import botocore.loaders
import botocore.parsers
import botocore.session
import urllib3.exceptions

from stagecoach.shared.base import tls, world
from stagecoach.shared.base.address import Address, s3_keys
from stagecoach.shared.base.errors import (
    CredentialsRefused,
    DeletionRefused,
    ObjectMissing,
    OperationRefused,
    StoreError,
    StoreUnavailable,
)
from stagecoach.shared.base.local_disk import folders_of, lacks_room, sync
from stagecoach.shared.config.services import StoreConfig

FAILURES = (
    boto.ClientError, boto.BotoCoreError, boto.HTTPClientError, botocore.parsers.ResponseParserError,
    urllib3.exceptions.HTTPError, OSError, RecursionError,
)  # fmt: skip
"""All that a request, or reading its answer, may raise; boto3 follows a web server's redirect (301) without end."""
_NO_CREDENTIALS = (
    boto.CredentialRetrievalError, boto.TokenRetrievalError, boto.NoAuthTokenError, boto.SSOError, boto.LoginError,
)  # fmt: skip
_NO_SERVER = (boto.EndpointConnectionError, boto.ConnectTimeoutError, boto.ProxyConnectionError)
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "RequestExpired"}
_REFUSED = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthFailure", "InvalidClientTokenId"}
RIGHTS = {
    "get_object": "s3:GetObject", "put_object": "s3:PutObject", "delete_object": "s3:DeleteObject",
    "list_objects_v2": "s3:ListBucket",
}  # fmt: skip
"""Operation → the right that it needs: all that the product asks of a bucket (deploy/store-policy.json)."""
_NO_DELETION = {403, 405, 409, 501}
"""Statuses by which stores without deletion answer: no right, no such method, a retention or a lock."""
_NO_PATH_STYLE = re.compile(r"SecondLevelDomainForbidden|PathStyle|(?i:third.level domain|virtual.(hosted|style))")
_CLOCKS = {"RequestTimeTooSkewed", "RequestInTheFuture"}
_CLOCKS_DIFFER_SECONDS = 300.0
"""Less than what S3 forgives (15 minutes), more than an answer takes."""
_OTHER_REGION = {
    "PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "IncorrectEndpoint",
}  # fmt: skip
_EXPECTING = re.compile(r"expecting '([a-z0-9-]+)'")
_QUERY = re.compile(r"\?[^\s\"']*")
"""Query of a URL in boto3's texts, which says nothing."""
_LONGEST_MESSAGE = 200
_READ_TRIES = 12
_PROOF = {"get_object": "ETag", "put_object": "ETag", "list_objects_v2": "IsTruncated"}
"""Fields in the reply of every S3 server, but not of a web page that replies 200."""
_LENGTH = {"content-length", "transfer-encoding"}
_NOT_S3 = (
    "what answers there is not an S3 server (a proxy, a web page?); check it, or correct store.url and "
    "store.endpoint_url"
)


class S3Store:
    """An S3 bucket, below a prefix. `folder` is where a server on this machine keeps the bucket that leaves it to the
    kernel when to write: an object is synced there, since the log that it replaces may be gone a moment later."""

    def __init__(
        self, bucket: str, prefix: str, make_client: Callable[[], Any], where: str, folder: Path | None = None
    ) -> None:
        self._bucket, self._prefix, self._folder, self._where = bucket, prefix, folder, where
        self._make_client = make_client
        self._client: Any = None

    def check(self) -> None:
        try:  # a listing, since the answer to HEAD cannot say what is wrong
            self._call("list_objects_v2", Prefix=self._prefix + ".check", Delimiter="/", MaxKeys=1)
        except StoreError as error:
            endpoint = urlsplit(self._client.meta.endpoint_url if self._client is not None else "")
            if endpoint.scheme == "http" and tls.speaks_tls(endpoint.hostname or "", endpoint.port or 80):
                raise StoreUnavailable(f"{self._where} speaks TLS; begin store.endpoint_url with https://") from None
            advice = "" if "store.url" in str(error) else "; correct store.url, or check the server"
            raise StoreUnavailable(f"{error}{advice}") from None

    def get(self, key: str) -> bytes:
        broken = ""
        for attempt in range(_READ_TRIES):  # boto3 retries a request, but not a body that breaks off
            world.sleep(0.02 * attempt)
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
            # buckets with object lock refuse an upload without a checksum; this header every S3 server knows
            digest = hashlib.md5(data, usedforsecurity=False).digest()
            self._call("put_object", key, Body=data, ContentMD5=base64.b64encode(digest).decode())
        except StoreError as error:  # an S3 server does not say why it fails
            if self._folder is None or (why := lacks_room(self._folder, len(data))) is None:
                raise
            raise StoreError(f"{error}; {why}") from None
        if self._folder is not None:
            path = self._folder / (self._prefix + key)
            try:
                with suppress(FileNotFoundError):  # deleted meanwhile: there is nothing to keep
                    sync([path, *folders_of(path, self._folder)])
            except OSError as error:
                raise StoreError(f"{key} may not be on the disk of {self._where}: {error}") from None

    def delete(self, key: str) -> None:
        with suppress(ObjectMissing):
            self._call("delete_object", key)

    def folders(self, prefix: str) -> list[str]:
        found = self._listed(prefix, "CommonPrefixes", Delimiter="/")
        return sorted(item["Prefix"].rstrip("/").rpartition("/")[2] for item in found)

    def keys(self, prefix: str) -> list[str]:
        return sorted(item["Key"].removeprefix(self._prefix) for item in self._listed(prefix, "Contents"))

    def _listed(self, prefix: str, kind: str, **more: Any) -> Iterator[Any]:
        while True:
            page = self._call("list_objects_v2", Prefix=self._prefix + prefix, **more)
            yield from page.get(kind, [])
            if not page.get("IsTruncated"):
                return
            more["ContinuationToken"] = page["NextContinuationToken"]

    def _call(self, operation: str, key: str | None = None, **arguments: Any) -> Any:
        if key is not None:
            arguments["Key"] = self._prefix + key
        asked = f"{operation} {'' if key is None else f'{key} '}on {self._where}"
        try:
            client = self._client = self._client or self._make_client()
            answer = getattr(client, operation)(Bucket=self._bucket, **arguments)
        except FAILURES as error:
            raised = self._failure(operation, asked, key, error)
            if isinstance(raised, CredentialsRefused):
                self._client = None  # a client keeps the credentials it was made with; they may be renewed by now
            raise raised from None
        if _PROOF.get(operation, "ResponseMetadata") not in answer:
            raise StoreError(f"{asked}: {_NOT_S3}")
        return answer

    def _failure(self, operation: str, asked: str, key: str | None, error: Exception) -> StoreError | StoreUnavailable:
        if isinstance(error, boto.ClientError):
            return self._refusal(operation, asked, key, error.response)
        where, said = self._where, _QUERY.sub("", str(error))
        if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
            remedy = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
            return CredentialsRefused(f"{where}: no credentials; {remedy}")
        if isinstance(error, _NO_CREDENTIALS):
            return CredentialsRefused(f"{where}: no credentials can be had ({said}); check where they come from")
        if isinstance(error, boto.SSLError):
            if (wrong := tls.cause(said, "store")) is not None:
                return StoreUnavailable(f"{where} cannot be trusted: {wrong}")
            return StoreUnavailable(
                f"{where}: TLS fails ({said}); check the server's certificate, name its authority in AWS_CA_BUNDLE, or "
                f"correct store.endpoint_url"
            )
        if isinstance(error, _NO_SERVER):
            return StoreUnavailable(f"{where} does not answer ({said}); start it or correct store.url")
        endless = isinstance(error, RecursionError) or isinstance(error.__context__, RecursionError)  # wrapped at times
        if endless or isinstance(error, botocore.parsers.ResponseParserError):
            return StoreError(f"{asked}: {_NOT_S3}")
        return StoreError(f"{asked} failed: {said}")

    def _refusal(
        self, operation: str, asked: str, key: str | None, response: Any
    ) -> StoreError | StoreUnavailable:  # fmt: skip
        """Returns the named error for an S3 error, by its code, or by the HTTP status."""
        error, about = response.get("Error", {}), response.get("ResponseMetadata", {})
        code, status = str(error.get("Code") or ""), about.get("HTTPStatusCode", 0)
        headers = about.get("HTTPHeaders", {})
        where, message = self._where, str(error.get("Message") or "").strip()[:_LONGEST_MESSAGE]
        if code == "NoSuchBucket":
            remedy = "create it or correct store.url"
            return StoreUnavailable(f"{where}: the bucket {self._bucket!r} does not exist; {remedy}")
        if code in _OTHER_REGION or (status == 301 and "x-amz-bucket-region" in headers):
            expecting = _EXPECTING.search(message)
            region = headers.get("x-amz-bucket-region") or error.get("Region") or (expecting and expecting[1])
            known = f"in the region {region}: --set store.region={region}"
            place = known if region else "in another region: set store.region, or correct store.endpoint_url"
            return StoreUnavailable(f"{where}: the bucket {self._bucket!r} is {place} ({code})")
        ahead = _seconds_ahead(headers.get("date", ""))
        if code in _EXPIRED | _REFUSED | _CLOCKS or (status in {401, 403} and abs(ahead) > _CLOCKS_DIFFER_SECONDS):
            return self._refused_credentials(code, ahead)
        if code == "NoSuchKey":
            return ObjectMissing(f"no object {key} in {where}")
        foreign = code in ("", str(status))  # the latter is botocore's own: the answer was no S3 error at all
        said = f"HTTP {status}" if foreign else f"{code} (HTTP {status}){f': {message}' if message else ''}"
        if _NO_PATH_STYLE.search(f"{code} {message}"):
            advice = "the server refuses the addressing style of the request; set store.addressing_style=virtual"
            return OperationRefused(f"{asked} is refused: {said}; {advice}")
        if operation == "delete_object" and status in _NO_DELETION:
            return DeletionRefused(f"{asked} is refused: {said}{self._lacking(operation, code)}")
        if status in {401, 403}:
            return OperationRefused(f"{asked} is refused: {said}{self._lacking(operation, code)}")
        return StoreError(f"{asked} failed: {said}{', and not as an S3 server says it' if foreign else ''}")

    def _lacking(self, operation: str, code: str) -> str:
        """Returns the remedy for a refusal: quotas, locks and proxies may say AccessDenied, so the server is quoted."""
        if code != "AccessDenied":
            return "; the credentials are not the cause, ask who runs the store"
        return f"; does the key have the right {RIGHTS[operation]} there? (docs/operations/security.md)"

    def _refused_credentials(self, code: str, seconds: float) -> CredentialsRefused:
        where = self._where
        if code in _CLOCKS or abs(seconds) > _CLOCKS_DIFFER_SECONDS:
            much = f"by {abs(seconds):.0f} s; ours is {'ahead' if seconds > 0 else 'behind'}" if seconds else "too much"
            return CredentialsRefused(
                f"{where} refuses the request ({code}): its clock and this machine's differ ({much}); set the wrong "
                f"one right"
            )
        if code in _EXPIRED:
            return CredentialsRefused(
                f"{where}: the credentials have expired ({code}); renew them in the profile, token file or role that "
                f"they come from, which is read again at each try. Those in the environment of a process cannot be "
                f"renewed: stop the run, then `stagecoach resume` it with new credentials"
            )
        return CredentialsRefused(
            f"{where} refuses the credentials ({code}); check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )


def _seconds_ahead(date: str) -> float:
    """Returns by how much our clock is ahead of the server's, from the date of its reply; 0 without one."""
    try:
        return world.unix_time() - parsedate_to_datetime(date).timestamp()
    except ValueError:
        return 0.0


@functools.cache
def _models(data_path: str | None) -> botocore.loaders.Loader:
    """Returns what botocore knows of S3, which each client would otherwise read again: 12 MB, and 0.06 s."""
    return botocore.loaders.create_loader(data_path)


def preload() -> None:
    """Reads what clients need in processes that are forked from this one; connects to nothing."""
    with suppress(boto.BotoCoreError):  # such as a damaged file of settings, which a role reports
        _session().create_client("s3", "none", aws_access_key_id="none", aws_secret_access_key="none")


def _session(variables: Any = None) -> botocore.session.Session:
    session = botocore.session.Session(session_vars=variables)
    session.register_component("data_loader", _models(session.get_config_variable("data_path")))
    return session


def s3_client(address: Address, config: StoreConfig) -> Any:
    """One boto3 client; the embedded server has credentials of its own, and no proxies. Raises `StoreUnavailable`."""
    access_key, secret_key = s3_keys(address)
    timeout, embedded = config.timeout_seconds, access_key is not None
    style = "path" if embedded else config.addressing_style
    variables: Any = {"profile": (None, None, None, None)} if embedded else None
    try:
        tls.check_files("store", config.ca_file)
        return boto3.session.Session(botocore_session=_session(variables)).client(
            "s3", endpoint_url=address.endpoint_url, region_name=config.region,
            verify=str(config.ca_file) if config.ca_file else None,
            aws_access_key_id=access_key, aws_secret_access_key=secret_key,
            config=botocore.config.Config(
                connect_timeout=timeout, read_timeout=timeout, proxies={} if embedded else None,
                retries={"total_max_attempts": config.retries + 1, "mode": "standard"},
                s3={"addressing_style": "path" if style == "auto" and address.endpoint_url else style},
                request_checksum_calculation="when_required", response_checksum_validation="when_required",
            ),
        )  # fmt: skip
    except (boto.BotoCoreError, ValueError) as error:
        remedy = "correct store.url or the AWS settings"
        raise StoreUnavailable(f"{address.store_url} cannot be used: {error}; {remedy}") from None
