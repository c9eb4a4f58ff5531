"""Workers of a training over gloo, each a process of its own, started as torchrun starts them."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from warm_python import WarmPython

from cluster.local import free_ports

SUPPORT = Path(__file__).resolve().parent


@contextmanager
def started(
    script: str, *arguments: str, count: int = 2, environment: Mapping[str, str] | None = None
) -> Iterator[list[WarmPython]]:
    """`count` workers that run a script of this folder; killed if they have not ended with the block."""
    (port,) = free_ports(1)
    shared = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    workers = [
        WarmPython(
            [sys.executable, str(SUPPORT / script), *arguments],
            env={**os.environ, **shared, **(environment or {}), "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
