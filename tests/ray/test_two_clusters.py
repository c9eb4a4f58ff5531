"""Ray clusters of one machine: the tests' own listens on loopback alone, and a command of ours that stands before two
uses the one it is given, says which, and does not guess."""

import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import pytest
from session_processes import check_loopback_only

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


def joined(environment: dict[str, str], **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", JOIN],
        env=environment | variables,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
    )


def test_the_tests_own_ray_listens_on_loopback_alone(ray_cluster: Any) -> None:
    """Its metrics agent asks nobody for a token."""
    check_loopback_only(ray_cluster._private.worker._global_node.get_session_dir_path())


@pytest.mark.slow
def test_beside_a_second_cluster_the_named_one_is_joined_and_no_other_is_guessed() -> None:
    with ExitStack() as running:
        one, other = (running.enter_context(local_cluster(num_cpus=2)) for _ in range(2))
        addresses = {cluster.environment["RAY_ADDRESS"] for cluster in (one, other)}
        assert len(addresses) == 2
        for cluster in (one, other):
            done = joined(cluster.environment)
            address = cluster.environment["RAY_ADDRESS"]
            assert done.returncode == 0, done.stderr
            assert done.stdout.split() == [address]
            assert f"on the Ray cluster at {address}\n" in done.stderr
        guess = joined(one.environment, RAY_ADDRESS="auto")
        assert (guess.returncode, guess.stdout) == (2, "")
        (sentence,) = guess.stderr.strip().splitlines()
        assert "RAY_ADDRESS=auto could mean any of" in sentence
        assert all(address in sentence for address in addresses)
        submitted = joined(one.environment, RAY_ADDRESS=one.dashboard_url)
        assert (submitted.returncode, submitted.stdout) == (2, "")
        assert f"ray job submit --address {one.dashboard_url}" in submitted.stderr
