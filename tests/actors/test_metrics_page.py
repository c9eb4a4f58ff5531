"""The page of measures: this application's own, from every node's agent, in the order that the format asks for."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client.parser import text_string_to_metric_families

from actors.serving.metrics_page import merged, metrics_page
from mbd_core.serving.api.errors import ApiError

AGENT = """# HELP ray_node_cpu_utilization CPUs
# TYPE ray_node_cpu_utilization gauge
ray_node_cpu_utilization{node="%(node)s"} 3.0
# HELP ray_mbd_committed_tokens_total tokens
# TYPE ray_mbd_committed_tokens_total counter
ray_mbd_committed_tokens_total{application="mine",model="tiny",replica="%(node)s"} %(tokens)s
ray_mbd_committed_tokens_total{application="other",model="tiny",replica="%(node)s"} 99.0
# HELP ray_mbd_tokens_per_forward of requests
# TYPE ray_mbd_tokens_per_forward histogram
ray_mbd_tokens_per_forward_bucket{application="mine",le="1.0",replica="%(node)s"} 1.0
ray_mbd_tokens_per_forward_bucket{application="mine",le="+Inf",replica="%(node)s"} 2.0
ray_mbd_tokens_per_forward_count{application="mine",replica="%(node)s"} 2.0
ray_mbd_tokens_per_forward_sum{application="mine",replica="%(node)s"} 5.0
# HELP ray_mbd_active_slots slots
# TYPE ray_mbd_active_slots gauge
ray_mbd_active_slots{application="other"} 4.0
"""


@contextmanager
def agent(text: str, status: int = 200) -> Iterator[dict[str, object]]:
    """A node as Ray lists it, whose agent serves `text`."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield {"Alive": True, "NodeManagerAddress": "127.0.0.1", "MetricsExportPort": server.server_port}
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_measures_of_all_nodes_stand_on_one_page() -> None:
    dead = {"Alive": False, "NodeManagerAddress": "192.0.2.1", "MetricsExportPort": 1}
    with agent(AGENT % {"node": "a", "tokens": 7}) as one, agent(AGENT % {"node": "b", "tokens": 8}) as two:
        page = asyncio.run(metrics_page([one, dead, two], application="mine"))
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert families.keys() == {"ray_mbd_committed_tokens", "ray_mbd_tokens_per_forward"}
    tokens = families["ray_mbd_committed_tokens"]
    assert (tokens.type, sum(s.value for s in tokens.samples)) == ("counter", 15)
    shares = families["ray_mbd_tokens_per_forward"]
    assert (shares.type, len(shares.samples)) == ("histogram", 8)
    assert page.count("# TYPE ray_mbd_tokens_per_forward histogram") == 1
    assert merged([], application="mine") == ""


def test_an_agent_that_fails_is_not_left_out_in_silence() -> None:
    with agent("", status=500) as broken, pytest.raises(ApiError, match="agent of a node") as caught:
        asyncio.run(metrics_page([broken], application="mine"))
    assert caught.value.status == 503
