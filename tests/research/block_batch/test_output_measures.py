"""The oracle does not mix block lengths, prefixes are prefixes, and means leave out what has ended."""

from pathlib import Path

import numpy as np
import pytest

from research.block_batch.outputs import (
    MeanRun,
    bifurcation_lengths,
    bifurcation_matrix,
    consensus,
    mean_bifurcation_lengths,
    mean_consensus,
    per_sample_oracle,
)
from research.block_batch.plots import draw_consensus


def run(accuracy: float, num_forwards: int) -> MeanRun:
    return MeanRun(accuracy=accuracy, num_forwards=num_forwards)


def test_the_oracle_keeps_accuracy_and_forwards_of_one_block_length() -> None:
    report = per_sample_oracle(
        [{4: run(1, 90), 8: run(1, 70), 16: run(0, 10)}, {4: run(0, 50), 8: run(0, 40), 16: run(0, 30)}]
    )
    assert (report.oracle.accuracy, report.oracle.num_forwards) == (0.5, 50.0)
    assert (report.mixed.accuracy, report.mixed.num_forwards) == (0.5, 20.0)
    assert report.chosen == {4: 0, 8: 1, 16: 1}
    assert (report.fixed[4].accuracy, report.fixed[4].num_forwards) == (0.5, 70.0)
    with pytest.raises(ValueError, match="sample 1"):
        per_sample_oracle([{4: run(1, 1)}, {8: run(1, 1)}])


def test_bifurcations_and_consensus() -> None:
    outputs = {4: [1, 2, 3, 4, 9], 8: [1, 2, 5, 4, 9], 16: [1, 2, 5, 6]}
    assert bifurcation_lengths(outputs) == {(4, 8): 2, (4, 16): 2, (8, 16): 3}
    assert mean_bifurcation_lengths([outputs, {4: [7], 8: [7, 1], 16: [7, 1]}])[8, 16] == 2.5
    third = 1 / 3
    np.testing.assert_allclose(
        consensus(outputs),
        [[1, 1, third, 2 / 3, 2 / 3], [1, 1, 2 / 3, 2 / 3, 2 / 3], [1, 1, 2 / 3, third, np.nan]],
    )


def test_matrices_over_samples() -> None:
    samples = [{4: [1, 2, 3], 8: [1, 5]}, {4: [7], 8: [7, 1, 1]}]
    assert bifurcation_matrix(samples).tolist() == [[2.0, 1.0], [1.0, 2.5]]
    np.testing.assert_allclose(mean_consensus(samples), [[1.0, 0.5, 0.5], [1.0, 0.5, 0.5]])
    ended = mean_consensus([{4: [1], 8: [1, 2]}])
    assert np.isnan(ended[0, 1]) and ended[1, 1] == 0.5


def test_the_heat_map_is_drawn(tmp_path: Path) -> None:
    for number, outputs in enumerate(({4: [1, 2, 3], 8: [1, 5, 3]}, {4: [1, 2]})):
        path = tmp_path / f"{number}.png"
        draw_consensus(outputs, path)
        assert path.read_bytes().startswith(b"\x89PNG")
