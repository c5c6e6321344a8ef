#!/usr/bin/env python3
"""Makes the bucket of STAGECOACH__STORE__URL if it is missing; waits a minute for a store that is just starting.

Keys come from the usual AWS variables, the place from STAGECOACH__STORE__ENDPOINT_URL and STAGECOACH__STORE__REGION.
"""

import os
import sys
import time
from urllib.parse import urlsplit

import boto3
from botocore.exceptions import BotoCoreError, ClientError

_SECONDS = 60.0


def main() -> None:
    """Exit code 0 when the bucket is there."""
    url = urlsplit(os.environ.get("STAGECOACH__STORE__URL", ""))
    if url.scheme != "s3" or not url.netloc:
        sys.exit("Error: STAGECOACH__STORE__URL is not s3://BUCKET/PREFIX")
    endpoint = os.environ.get("STAGECOACH__STORE__ENDPOINT_URL") or None
    region = os.environ.get("STAGECOACH__STORE__REGION", "us-east-1")
    client = boto3.client("s3", endpoint_url=endpoint, region_name=region)
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            if url.netloc not in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
                client.create_bucket(Bucket=url.netloc)
            print(f"bucket {url.netloc} is there")
            return
        except (BotoCoreError, ClientError) as error:
            refused = isinstance(error, ClientError) and error.response["ResponseMetadata"]["HTTPStatusCode"] < 500
            if refused or time.monotonic() > deadline:
                sys.exit(f"Error: bucket {url.netloc} at {endpoint or 'AWS'}: {error}")
            time.sleep(1)


if __name__ == "__main__":
    main()
