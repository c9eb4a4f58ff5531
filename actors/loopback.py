"""A replica's port for calls from other replicas, on loopback where its node is.

Ray Serve opens it on every interface, and takes pickled calls there from anybody, without Ray's token. On a node that
has one machine's loopback for its address (`cluster/local.py`) nobody else has to reach it.
"""

import ray
from ray.serve._private import replica

LOOPBACK, EVERYWHERE = "127.0.0.1", "[::]"


def keep_to_loopback() -> None:
    """Call it in a replica's constructor: Serve opens the port after that."""
    if ray.util.get_node_ip_address() != LOOPBACK:
        return
    add_port = replica.add_port_to_grpc_server
    replica.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace(EVERYWHERE, LOOPBACK))
