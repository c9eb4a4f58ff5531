"""A server of S3's protocol for the tests: moto's, in a process of its own."""

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import boto3
import fsspec
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from cluster.local import LOOPBACK, free_ports

START_SECONDS = 120.0
SERVER = (sys.executable, "-m", "moto.server")


@contextmanager
def running_server() -> Iterator[dict[str, str]]:
    """The environment by which a client finds the server, which has one bucket, `bucket`."""
    (port,) = free_ports(1)
    environment = client_environment(f"http://{LOOPBACK}:{port}")
    command = [*SERVER, "-H", LOOPBACK, "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        make_bucket(environment, server)
        yield environment
    finally:
        server.kill()
        server.wait()


def client_environment(url: str) -> dict[str, str]:
    """By which a client finds the server at this URL."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",  # without credentials no other server is asked for some
    }


def use_store(environment: dict[str, str], patch: pytest.MonkeyPatch) -> None:
    """This process finds the server of this environment, and keeps no client of another one."""
    for name, value in environment.items():
        patch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def make_bucket(environment: dict[str, str], server: "subprocess.Popen[bytes]") -> None:
    """Make the bucket `bucket` once the server has started."""
    client = boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}),
    )
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert server.poll() is None, f"the S3 server ended with exit code {server.returncode}"
        assert time.monotonic() < deadline, "the S3 server did not start"
        with suppress(BotoCoreError):
            client.create_bucket(Bucket="bucket")
            break
        time.sleep(0.1)


@contextmanager
def only_known_keys(environment: dict[str, str]) -> Iterator[None]:
    """The server refuses every access key, since it knows none, for as long as the block lasts."""

    def set_free_actions(number: str) -> None:
        request = urllib.request.Request(f"{environment['AWS_ENDPOINT_URL']}/moto-api/reset-auth", number.encode())
        request.add_header("Content-Type", "text/plain")
        # not `urlopen`, whose opener keeps the proxies of the first test that called it
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(request, timeout=START_SECONDS).close()

    set_free_actions("0")
    try:
        yield
    finally:
        set_free_actions("inf")
