"""What an S3 server, or the way to it, answered instead of the wanted: as the store's named errors.

`StoreUnavailable` (and `CredentialsRefused`) say what a person has to do; `StoreError` is what passes by itself.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import botocore.exceptions
import botocore.parsers
import urllib3.exceptions

from shared.errors import CredentialsRefused, ObjectMissing, StoreError, StoreUnavailable
from shared.tls import cause

FAILURES = (
    botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError, botocore.exceptions.HTTPClientError,
    botocore.parsers.ResponseParserError, urllib3.exceptions.HTTPError, OSError, RecursionError,
)  # fmt: skip
"""All that a request, or reading its answer, may raise; boto3 follows a web server's redirect (301) without end."""

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken", "RequestExpired"}
_REFUSED = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "AuthFailure", "InvalidClientTokenId"}
_CLOCKS = {"RequestTimeTooSkewed", "RequestInTheFuture"}
_CLOCKS_DIFFER_SECONDS = 300.0
"""Less than what S3 forgives (15 minutes), more than an answer takes."""
_ELSEWHERE = {
    "PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "IncorrectEndpoint",
}  # fmt: skip
_EXPECTING = re.compile(r"expecting '([a-z0-9-]+)'")
_LONGEST_MESSAGE = 200
_QUERY = re.compile(r"\?[^\s\"']*")
"""What follows a URL in boto3's texts and tells nobody anything."""


@dataclass(frozen=True)
class Request:
    """What was asked of whom."""

    operation: str
    key: str | None
    bucket: str
    where: str


def named(error: Exception, request: Request) -> StoreError | StoreUnavailable:
    """The named error for one of `FAILURES`."""
    if isinstance(error, botocore.exceptions.ClientError):
        return _refusal(dict(error.response), request)
    where, said = request.where, _QUERY.sub("", str(error))
    if isinstance(error, botocore.exceptions.NoCredentialsError | botocore.exceptions.PartialCredentialsError):
        return CredentialsRefused(
            f"{where}: no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
        )
    if isinstance(error, _NO_CREDENTIALS):
        return CredentialsRefused(f"{where}: the credentials cannot be had ({said}); see to where they come from")
    if isinstance(error, botocore.exceptions.SSLError):
        wrong = cause(said, "store")
        if wrong is not None:
            return StoreUnavailable(f"{where} cannot be trusted: {wrong}")
        return StoreUnavailable(
            f"{where}: TLS fails ({said}); see to the server's certificate, name its authority in AWS_CA_BUNDLE, or "
            f"correct store.endpoint_url"
        )
    if isinstance(error, _NOBODY_THERE):
        return StoreUnavailable(f"{where} does not answer ({said}); start it or correct store.url")
    if isinstance(error, botocore.parsers.ResponseParserError | RecursionError):
        return not_s3(request)
    return StoreError(f"{_asked(request)} failed: {said}")


def not_s3(request: Request) -> StoreError:
    """Something answers there that is no S3 server: a proxy's page, a web server, a balancer without its servers."""
    return StoreError(
        f"{_asked(request)}: what answers there is not an S3 server (a proxy, a web page?); see to it, or correct "
        f"store.url and store.endpoint_url"
    )


_NO_CREDENTIALS = (
    botocore.exceptions.CredentialRetrievalError, botocore.exceptions.TokenRetrievalError,
    botocore.exceptions.NoAuthTokenError, botocore.exceptions.SSOError, botocore.exceptions.LoginError,
)  # fmt: skip
_NOBODY_THERE = (
    botocore.exceptions.EndpointConnectionError, botocore.exceptions.ConnectTimeoutError,
    botocore.exceptions.ProxyConnectionError,
)  # fmt: skip


def _asked(request: Request) -> str:
    return " ".join(word for word in (request.operation, request.key, "on", request.where) if word)


def _refusal(response: dict[str, Any], request: Request) -> StoreError | StoreUnavailable:
    """An S3 error, by its code; the status counts where an answer to HEAD has no code."""
    code = str(response.get("Error", {}).get("Code", ""))
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code == "NoSuchBucket":
        return StoreUnavailable(
            f"{request.where}: there is no bucket {request.bucket!r}; create it or correct store.url"
        )
    if code in _ELSEWHERE or (status == 301 and "x-amz-bucket-region" in response["ResponseMetadata"]["HTTPHeaders"]):
        return _in_another_region(code, response, request)
    if code in _EXPIRED | _REFUSED | _CLOCKS or status in {401, 403}:
        return _refused_credentials(code, response, request)
    if code == "NoSuchKey" or (request.operation == "head_object" and status == 404):
        return ObjectMissing(f"no object {request.key} in {request.where}")
    if code == str(status):  # botocore's own: the answer was no S3 error at all
        return StoreError(f"{_asked(request)} failed: HTTP {status}, and not as an S3 server says it")
    message = str(response.get("Error", {}).get("Message", ""))[:_LONGEST_MESSAGE]
    return StoreError(f"{_asked(request)} failed: {code} (HTTP {status}){f': {message}' if message else ''}")


def _in_another_region(code: str, response: dict[str, Any], request: Request) -> StoreUnavailable:
    """The bucket's region, wherever the answer says it: header, element, or in its text only."""
    error, headers = response.get("Error", {}), response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    said = _EXPECTING.search(str(error.get("Message", "")))
    region = headers.get("x-amz-bucket-region") or error.get("Region") or (said and said.group(1))
    where = f"in the region {region}: --set store.region={region}" if region else "in another region: set store.region"
    at = "" if region else ", or correct store.endpoint_url"
    return StoreUnavailable(f"{request.where}: the bucket {request.bucket!r} is {where}{at} ({code})")


def _refused_credentials(code: str, response: dict[str, Any], request: Request) -> CredentialsRefused:
    seconds = _clocks_differ(response)
    if code in _CLOCKS or abs(seconds) > _CLOCKS_DIFFER_SECONDS:
        much = f"by {abs(seconds):.0f} s; ours is {'ahead' if seconds > 0 else 'behind'}" if seconds else "too much"
        return CredentialsRefused(
            f"{request.where} refuses the request ({code}): its clock and this machine's differ ({much}); set the "
            f"wrong one right"
        )
    if code in _EXPIRED:
        return CredentialsRefused(
            f"{request.where}: the credentials have expired ({code}); renew them in the profile, token file or role "
            f"that they come from, which is read again at each try. Those in the environment of a process cannot be "
            f"renewed: stop the run, then `stagecoach resume` it with new ones"
        )
    return CredentialsRefused(
        f"{request.where} refuses the credentials ({code}); check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the "
        f"bucket's policy"
    )


def _clocks_differ(response: dict[str, Any]) -> float:
    """Seconds that our clock is ahead of the server's, by its answer; 0 where it does not say."""
    date = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        return time.time() - parsedate_to_datetime(date).timestamp()
    except ValueError:
        return 0.0
