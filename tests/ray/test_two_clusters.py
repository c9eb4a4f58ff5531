"""Two Ray clusters on one machine: a command of ours uses the one it is given, says which, and does not guess."""

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from cluster.local import ROOT, local_cluster

JOIN = """
import sys
from cluster.local import connect
from jobs.command_line import command

def run() -> None:
    '''Joins a cluster.'''
    connect(worker_logs=False)
    import ray
    print(ray.get_runtime_context().gcs_address)

sys.exit(command(run)([]))
"""


def joined(environment: Mapping[str, str], **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", JOIN],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )


def test_beside_a_second_cluster_the_named_one_is_joined_and_no_other_is_guessed(ray_cluster: Any) -> None:
    address = ray_cluster.get_runtime_context().gcs_address
    with local_cluster(num_cpus=2) as other:
        environments = {address: {**os.environ, "RAY_ADDRESS": address}}
        environments[other.environment["RAY_ADDRESS"]] = other.environment
        assert len(environments) == 2
        for address, environment in environments.items():
            done = joined(environment)
            assert done.returncode == 0, done.stderr
            assert done.stdout.split() == [address]
            assert f"on the Ray cluster at {address}\n" in done.stderr
        guess = joined(other.environment, RAY_ADDRESS="auto")
        assert (guess.returncode, guess.stdout) == (2, "")
        (sentence,) = guess.stderr.strip().splitlines()
        assert "RAY_ADDRESS=auto could mean any of" in sentence
        assert all(address in sentence for address in environments)
        submitted = joined(other.environment, RAY_ADDRESS=other.dashboard_url)
        assert (submitted.returncode, submitted.stdout) == (2, "")
        assert f"ray job submit --address {other.dashboard_url}" in submitted.stderr
