"""Serve a model over OpenAI's HTTP API."""

import sys
from dataclasses import replace
from typing import Annotated

from actors.serving.args import GatewayArgs, ModelArgs
from mbd_core.command_line import command
from mbd_core.fields import CLUSTER, Flag, Ge, Le


def run(
    model: ModelArgs,
    gateways: GatewayArgs,
    *,
    host: Annotated[
        str, Flag("Address to listen on; one that others reach serves them all, unless --api-keys is given.", CLUSTER)
    ] = "127.0.0.1",
    port: Annotated[int, Ge(1), Le(65535), Flag("Port to listen on.", CLUSTER)] = 8000,
) -> None:
    """Serve a model over OpenAI's HTTP API, until Ctrl-C or SIGTERM.

    It runs on the cluster of RAY_ADDRESS or starts a local cluster, and stops what it started. After the first signal
    it refuses new requests (503) and finishes running requests, for at most --drain-seconds; a second signal stops it
    at once. Exit codes: 0 stopped, 1 it could not be served, 2 bad input (an incomplete model, a port in use).
    """
    from mbd_core.serving.api.access import read_keys

    model.checked()
    if gateways.api_keys is not None:
        read_keys(gateways.api_keys)
        gateways = replace(gateways, api_keys=gateways.api_keys.resolve())  # gateways have other working folders

    from actors.serving.serve import check_port, serve_until_stopped  # importing Ray takes seconds: bad input first

    check_port(host, port)
    serve_until_stopped(model, gateways, host=host, port=port)


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
