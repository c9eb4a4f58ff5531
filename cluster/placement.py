"""How many GPUs each process of a job asks for, from what the cluster's nodes have."""

from collections.abc import Mapping, Sequence


class ClusterTooSmall(ValueError):
    """The cluster has less than what is asked of it; Ray would wait for the rest for ever."""


def gpus_each(nodes: Sequence[Mapping[str, float]], *, processes: int, ranks: int = 1) -> int:
    """GPUs for each of `processes` that spread over `ranks`: one a rank, or 0, and then all of them run on CPUs.

    `nodes` are the nodes' resources by Ray's names. A process stays on one node. Raises `ClusterTooSmall`
    where several ranks find too few GPUs on a cluster that has some, or too few CPUs, one a rank.
    """
    with_gpus = sum(int(node.get("GPU", 0)) // ranks for node in nodes)
    if ranks > 1:
        counted = "GPU" if any(node.get("GPU", 0) >= 1 for node in nodes) else "CPU"
        if sum(int(node.get(counted, 0)) // ranks for node in nodes) < processes:
            there = ", ".join(f"{node.get(counted, 0):g}" for node in nodes)
            raise ClusterTooSmall(
                f"{processes} x {ranks} tensor-parallel ranks need {ranks} {counted}s on one node for each of the "
                f"{processes}; the cluster's nodes have {there}"
            )
    return ranks if with_gpus >= processes else 0
