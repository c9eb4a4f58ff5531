"""How many GPUs a process asks for: never more than a node has, never a wait without end."""

import pytest

from cluster.placement import ClusterTooSmall, gpus_each

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
    assert gpus_each(nodes, processes=processes, ranks=ranks) == wanted


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
    ],
)
def test_what_finds_no_room_is_refused(
    nodes: list[dict[str, float]], processes: int, ranks: int, sentence: str
) -> None:
    with pytest.raises(ClusterTooSmall, match=sentence):
        gpus_each(nodes, processes=processes, ranks=ranks)
