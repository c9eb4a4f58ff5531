"""The head is killed under load and started again: with its state in a Redis beside the cluster nothing is lost.

`pytest tests/hosts -s` prints what it costs.
"""

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from host_cluster import HostCluster, NoNamespaces, host_cluster, wait_for
from served_hosts import GATEWAY, SERVED_ENGINE, deployed, say

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster() -> Iterator[HostCluster]:
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server on this machine")
    started = time.monotonic()
    try:
        with host_cluster(num_workers=2, external_redis=True) as cluster:
            cluster.start(*cluster.workers, num_cpus=2)
            say("the cluster is up", since=started)
            yield cluster
    except NoNamespaces as error:
        pytest.skip(f"no hosts can be made on this machine: {error}")


def test_answers_go_on_without_the_head_and_the_cluster_is_whole_with_the_next_one(cluster: HostCluster) -> None:
    """Streams that run, requests that come while there is no head, and a replica that dies after it has come back."""
    questions = range(10, 30)
    with deployed(cluster, through=cluster.workers[0]) as client, ThreadPoolExecutor(5 * len(questions)) as threads:
        wanted = list(threads.map(client.whole, questions))
        engines, gateways = cluster.actors(SERVED_ENGINE), cluster.actors(GATEWAY)
        streams = [threads.submit(client.streamed, cups) for cups in [*questions] * 4]  # they outlast a slow kill
        wait_for(lambda: any(running >= 4 for running in client.engines().values()), "busy engines")

        fault = time.monotonic()
        cluster.head.kill()
        assert not all(stream.done() for stream in streams)
        assert list(threads.map(client.whole, questions)) == wanted
        say("20 requests that came after the kill are answered, without a head", since=fault)
        answers = [stream.result() for stream in streams]
        assert [answer.text for answer in answers] == wanted * 4
        say("all streams have ended", since=fault)
        print(f"         longest pause of a stream: {max(answer.longest_pause for answer in answers):.1f} s")

        cluster.start(cluster.head, num_cpus=0)
        say("the head is back", since=fault)
        wait_for(lambda: len(cluster.living_addresses()) == 3, "all nodes")
        assert cluster.actors(SERVED_ENGINE) == engines and cluster.actors(GATEWAY) == gateways, "nothing was replaced"
        assert list(threads.map(client.whole, questions)) == wanted
        say("it knows the nodes and the actors as they were", since=fault)

        fault = time.monotonic()
        cluster.workers[1].kill()
        cluster.start(cluster.workers[1], num_cpus=2)
        wait_for(
            lambda: len(client.engines()) == 2 and cluster.actors(SERVED_ENGINE) != engines,
            "another engine in its place",
        )
        say("and replaces what dies on a host", since=fault)
        assert list(threads.map(client.whole, questions)) == wanted
