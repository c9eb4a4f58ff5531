"""What a job's processes ask for, and whether they find room: never more than a node has, never a wait without end."""

from typing import Any

import pytest

from cluster.topology import ClusterTooSmall, Topology, check_room, plan_topology

CPUS = {"CPU": 8.0}


def gpus(count: int) -> dict[str, float]:
    return {"CPU": 8.0, "GPU": float(count)}


@pytest.mark.parametrize(
    ("nodes", "processes", "ranks", "wanted"),
    [
        ([CPUS], 3, 1, 0),
        ([gpus(2)], 2, 1, 1),
        ([gpus(1), gpus(1)], 2, 1, 1),
        ([CPUS], 2, 2, 0),
        ([gpus(4)], 2, 2, 2),
        ([CPUS, gpus(8)], 1, 8, 8),
        ([gpus(2), gpus(3)], 2, 2, 2),
        ([{"CPU": 3.0}], 3, 1, 0),
        ([{"CPU": 1.0, "GPU": 0.5}], 1, 1, 0),
    ],
)
def test_one_gpu_a_rank_or_none(nodes: list[dict[str, float]], processes: int, ranks: int, wanted: int) -> None:
    topology = plan_topology(nodes, processes=processes, ranks=ranks)
    assert topology.bundle == {"CPU": ranks, "GPU": wanted}
    assert topology.bundles == [topology.bundle] * processes
    assert topology.room(nodes) >= processes


@pytest.mark.parametrize(
    ("nodes", "processes", "ranks", "sentence"),
    [
        (
            [gpus(1), gpus(1)],
            1,
            2,
            "ranks need 2 GPUs and 2 CPUs .* have 1 GPU and 8 CPUs, 1 GPU and 8 CPUs; ask for fewer$",
        ),
        (
            [gpus(3), CPUS],
            2,
            2,
            "^2 x 2 tensor-parallel ranks need .* have 3 GPUs and 8 CPUs, 0 GPUs and 8 CPUs; ask for fewer$",
        ),
        ([{"CPU": 4.0, "GPU": 8.0}], 1, 8, "8 GPUs and 8 CPUs on one node .*; the cluster's nodes have 8 GPUs and 4"),
        ([{"CPU": 8.0}, {"GPU": 8.0}], 1, 1, "0 GPUs and 8 CPUs, 8 GPUs and 0 CPUs; ask for fewer$"),
        (
            [gpus(2)],
            3,
            1,
            "^3 engines need 1 GPU and 1 CPU each; the cluster's nodes have 2 GPUs and 8 CPUs; ask for fewer$",
        ),
        (
            [{"CPU": 3.0}],
            2,
            2,
            "need 2 CPUs on one node for each of the 2; the cluster's nodes have 3 CPUs; ask for fewer$",
        ),
        ([{"CPU": 3.0}], 4, 1, "^4 engines need 1 CPU each; the cluster's nodes have 3 CPUs; ask for fewer$"),
        ([], 1, 1, "^1 engine needs 1 CPU each; the cluster's nodes have nothing; ask for fewer$"),
    ],
)
def test_what_finds_no_room_is_refused(
    nodes: list[dict[str, float]], processes: int, ranks: int, sentence: str
) -> None:
    with pytest.raises(ClusterTooSmall, match=sentence):
        plan_topology(nodes, processes=processes, ranks=ranks)


def test_the_device_that_is_asked_for_decides() -> None:
    """Only who asks for CPUs computes on those of a cluster that has GPUs; GPUs that are not there are missed."""
    assert plan_topology([gpus(1)], processes=2, device="cpu").num_gpus == 0
    with pytest.raises(ClusterTooSmall, match=r"^2 workers need 1 GPU"):
        plan_topology([gpus(1)], processes=2, noun="workers")
    with pytest.raises(ClusterTooSmall, match="have 0 GPUs and 8 CPUs"):
        plan_topology([CPUS], processes=1, ranks=2, device="gpu")


def test_cpus_to_spare_lie_on_any_node() -> None:
    nodes = [{"CPU": 2.0}, {"CPU": 3.0}]
    two = Topology(processes=2, ranks=2)
    two.check(nodes, spare_cpus=1)
    with pytest.raises(ClusterTooSmall, match="2 CPUs"):
        two.check(nodes, spare_cpus=2)


@pytest.mark.parametrize(
    ("nodes", "fitting"), [([], 0), ([gpus(4)], 2), ([gpus(3), gpus(5), CPUS], 3), ([{"CPU": 3.0, "GPU": 8.0}], 1)]
)
def test_the_room_for_processes_is_counted_by_node(nodes: list[dict[str, float]], fitting: int) -> None:
    assert Topology(processes=1, ranks=2, gpus_per_rank=1).room(nodes) == fitting


def test_topologies_share_the_nodes() -> None:
    """The largest are placed first: small ones would take a GPU of each node before."""
    small, large = Topology(processes=2, ranks=1, gpus_per_rank=1), Topology(processes=1, ranks=4, gpus_per_rank=1)
    on_cpus = Topology(processes=2, ranks=4)
    check_room([on_cpus, small, large], [gpus(4), CPUS, gpus(2)])
    check_room([small, large, large], [gpus(5), gpus(5)])
    with pytest.raises(ClusterTooSmall) as raised:
        check_room([small, large], [gpus(3), gpus(3)])
    assert str(raised.value) == (
        "2 engines need 1 GPU and 1 CPU each and 1 x 4 tensor-parallel ranks need 4 GPUs and 4 CPUs on one node for "
        "each of the 1; the cluster's nodes have 3 GPUs and 8 CPUs, 3 GPUs and 8 CPUs; ask for fewer"
    )


@pytest.mark.parametrize("fields", [{"processes": -1}, {"ranks": 0}, {"gpus_per_rank": 2}])
def test_a_topology_is_validated(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(fields))}={next(iter(fields.values()))} "):
        Topology(**{"processes": 1, **fields})


@pytest.mark.parametrize(
    ("nodes", "processes", "share"),
    [
        ([({"CPU": 16.0}, 100)], 4, 25),
        ([({"CPU": 2.0}, 100), ({"CPU": 2.0}, 100)], 4, 50),
        ([({"CPU": 2.0}, 100), ({"CPU": 16.0}, 400)], 8, 50),
        ([({"CPU": 2.0}, 80), ({"CPU": 16.0}, 400)], 8, 40),
        ([({"CPU": 8.0}, 100), ({"GPU": 8.0}, 1)], 1, 100),
    ],
)
def test_the_processes_of_one_node_share_its_memory(
    nodes: list[tuple[dict[str, float], int]], processes: int, share: int
) -> None:
    assert Topology(processes=processes, noun="workers").share(nodes) == share
