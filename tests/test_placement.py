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
        ([gpus(2)], 3, 1, 0),  # not enough for each: all on CPUs
        ([gpus(1), gpus(1)], 2, 1, 1),
        ([CPUS], 2, 2, 0),
        ([gpus(4)], 2, 2, 2),
        ([CPUS, gpus(8)], 1, 8, 8),
        ([gpus(2), gpus(3)], 2, 2, 2),
    ],
)
def test_one_gpu_a_rank_or_none(nodes: list[dict[str, float]], processes: int, ranks: int, wanted: int) -> None:
    assert gpus_each(nodes, processes=processes, ranks=ranks) == wanted


@pytest.mark.parametrize(
    ("nodes", "processes", "ranks", "sentence"),
    [
        ([gpus(1), gpus(1)], 1, 2, "need 2 GPUs on one node for each of the 1; the cluster's nodes have 1, 1"),
        ([gpus(3), CPUS], 2, 2, "2 x 2 tensor-parallel ranks need 2 GPUs .* have 3, 0"),
        ([{"CPU": 3.0}], 2, 2, "need 2 CPUs on one node for each of the 2; the cluster's nodes have 3"),
    ],
)
def test_ranks_that_find_no_room_are_refused(
    nodes: list[dict[str, float]], processes: int, ranks: int, sentence: str
) -> None:
    with pytest.raises(ClusterTooSmall, match=sentence):
        gpus_each(nodes, processes=processes, ranks=ranks)
