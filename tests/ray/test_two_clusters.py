"""Two Ray clusters on one machine: a command of ours uses the one it is given, says which, and does not guess."""

import subprocess
import sys
from contextlib import ExitStack

import pytest

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
