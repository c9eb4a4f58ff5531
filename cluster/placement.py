"""How many GPUs each process of a job asks for, from what the cluster's nodes have."""

from collections.abc import Mapping, Sequence


class ClusterTooSmall(ValueError):
    """The cluster has less than what is asked of it; Ray would wait for the rest for ever."""


def gpus_each(nodes: Sequence[Mapping[str, float]], *, processes: int, ranks: int = 1) -> int:
    """GPUs for each of `processes` that spread over `ranks`: one a rank on a cluster that has GPUs, else 0.

    `nodes` are the nodes' resources by Ray's names. A process stays on one node and takes a CPU a rank in any case.
    Raises `ClusterTooSmall` where not all find room: a cluster that has GPUs never computes on CPUs unasked.
    """
    kinds = ("GPU", "CPU") if any(node.get("GPU", 0) >= 1 for node in nodes) else ("CPU",)
    if sum(min(int(node.get(kind, 0)) // ranks for kind in kinds) for node in nodes) < processes:
        needed = " and ".join(_counted(ranks, kind) for kind in kinds)
        there = ", ".join(" and ".join(_counted(node.get(kind, 0), kind) for kind in kinds) for node in nodes)
        what = f"{processes} x {ranks} tensor-parallel ranks" if ranks > 1 else f"{processes} engines"
        each = f"{needed} on one node for each of the {processes}" if ranks > 1 else f"{needed} each"
        raise ClusterTooSmall(f"{what} need {each}; the cluster's nodes have {there}; ask for fewer")
    return ranks if "GPU" in kinds else 0


def _counted(number: float, kind: str) -> str:
    return f"{number:g} {kind}" if number == 1 else f"{number:g} {kind}s"
