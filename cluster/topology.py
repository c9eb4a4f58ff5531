"""The placement of a job's processes on a cluster's nodes: the resources of each process, and room for all of them.

Serving, training, sweeps and the Kubernetes manifests take their resources from `Topology`. `nodes` are the nodes'
resources by Ray's names, as `ray.nodes()` gives them: `{"CPU": 16.0, "GPU": 2.0}`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Device = Literal["cpu", "gpu"]
Resources = Mapping[str, float]


class ClusterTooSmall(ValueError):
    """The cluster has too few resources for a run; Ray would wait for the missing resources for ever."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """`processes` of one kind: replicas of an engine, or training workers.

    A process stays on one node with its tensor-parallel `ranks`, and each rank takes a CPU and `gpus_per_rank` GPUs.
    `noun` is the word for the processes in sentences.
    """

    processes: int
    ranks: int = 1
    gpus_per_rank: int = 0
    noun: str = "engines"

    def __post_init__(self) -> None:
        if self.processes < 0 or self.ranks < 1 or self.gpus_per_rank not in (0, 1):
            raise ValueError(
                f"processes={self.processes} must be at least 0, ranks={self.ranks} at least 1, "
                f"gpus_per_rank={self.gpus_per_rank} 0 or 1"
            )

    @property
    def num_cpus(self) -> int:
        """CPUs of one process."""
        return self.ranks

    @property
    def num_gpus(self) -> int:
        """GPUs of one process."""
        return self.ranks * self.gpus_per_rank

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one process, all of one node: a placement group's bundle."""
        return {"CPU": float(self.num_cpus), "GPU": float(self.num_gpus)}

    @property
    def bundles(self) -> list[dict[str, float]]:
        """A bundle for each process."""
        return [self.bundle for _ in range(self.processes)]

    def room(self, nodes: Iterable[Resources]) -> int:
        """The number of such processes that fit on the nodes; it may exceed `processes`."""
        return sum(_times(self.bundle, node) for node in nodes)

    def share(self, nodes: Iterable[tuple[Resources, int]]) -> int:
        """The amount that one process gets on the node where processes get least.

        `nodes` are pairs: a node's resources, and the amount that its processes share, in bytes of memory for example.
        A node may get as many processes as it has room for.
        """
        counts = ((min(self.processes, _times(self.bundle, node)), amount) for node, amount in nodes)
        return min(amount // count for count, amount in counts if count)

    def check(self, nodes: Sequence[Resources], *, spare_cpus: int = 0) -> None:
        """Raise `ClusterTooSmall` if not all processes find room, or if fewer than `spare_cpus` CPUs are left beside
        them."""
        check_room([self], nodes, spare_cpus=spare_cpus)


def plan_topology(
    nodes: Sequence[Resources],
    *,
    processes: int,
    ranks: int = 1,
    device: Device | None = None,
    noun: str = "engines",
    spare_cpus: int = 0,
) -> Topology:
    """The topology of `processes` on a cluster of these nodes, on `device`.

    Without `device` each rank takes a GPU if the cluster has one; otherwise ranks take CPUs only. Raises
    `ClusterTooSmall` as `Topology.check` does.
    """
    on_gpus = device == "gpu" or (device is None and any(node.get("GPU", 0) >= 1 for node in nodes))
    topology = Topology(processes=processes, ranks=ranks, gpus_per_rank=int(on_gpus), noun=noun)
    topology.check(nodes, spare_cpus=spare_cpus)
    return topology


def check_room(topologies: Sequence[Topology], nodes: Sequence[Resources], *, spare_cpus: int = 0) -> None:
    """Raise `ClusterTooSmall` unless the processes of all topologies find room beside each other.

    `spare_cpus` CPUs, on any nodes, must be left for other processes of one CPU each. The largest processes are placed
    first, each on the first node that has room.
    """
    free = [dict(node) for node in nodes]
    for topology in sorted(topologies, key=lambda t: (t.num_gpus, t.num_cpus), reverse=True):
        for _ in range(topology.processes):
            node = next((node for node in free if _times(topology.bundle, node)), None)
            if node is None:
                raise _too_small(topologies, nodes, spare_cpus)
            for kind, amount in topology.bundle.items():
                node[kind] = node.get(kind, 0) - amount
    if sum(int(node.get("CPU", 0)) for node in free) < spare_cpus:
        raise _too_small(topologies, nodes, spare_cpus)


def fits(bundle: Resources, node: Resources) -> bool:
    """Whether the node has room for the bundle."""
    return _times(bundle, node) > 0


def _times(bundle: Resources, node: Resources) -> int:
    """The number of bundles that fit on the node."""
    return min(int(node.get(kind, 0) // amount) for kind, amount in bundle.items() if amount)


def _too_small(topologies: Sequence[Topology], nodes: Sequence[Resources], spare_cpus: int) -> ClusterTooSmall:
    needs = " and ".join(_need(topology) for topology in topologies)
    spare_text = f", with {_amount_text(spare_cpus, 'CPU')} to spare" if spare_cpus else ""
    kinds = _kinds(any(topology.num_gpus for topology in topologies))
    stock = ", ".join(" and ".join(_amount_text(node.get(kind, 0), kind) for kind in kinds) for node in nodes)
    return ClusterTooSmall(f"{needs}{spare_text}; the cluster's nodes have {stock or 'nothing'}; ask for fewer")


def _need(topology: Topology) -> str:
    processes, ranks, verb = topology.processes, topology.ranks, "needs" if topology.processes == 1 else "need"
    resources = " and ".join(_amount_text(ranks, kind) for kind in _kinds(topology.num_gpus > 0))
    if ranks > 1:
        return f"{processes} x {ranks} tensor-parallel ranks need {resources} on one node for each of the {processes}"
    noun = topology.noun.removesuffix("s") if processes == 1 else topology.noun
    return f"{processes} {noun} {verb} {resources} each"


def _kinds(on_gpus: bool) -> tuple[str, ...]:
    return ("GPU", "CPU") if on_gpus else ("CPU",)


def _amount_text(number: float, kind: str) -> str:
    return f"{number:g} {kind}" if number == 1 else f"{number:g} {kind}s"
