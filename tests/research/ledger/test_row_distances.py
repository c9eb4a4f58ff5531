"""Distances of training states from traces, and Spearman's correlation of them, its exact test and its interval."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mbd_core.checkpoint.folder import read_folder
from mbd_core.evaluation.measures.statistics import Interval
from mbd_core.multitf.recipes.shipped import LEDGER_MBD, LEDGER_TF
from mbd_core.multitf.states.fitted_noise import FittedNoise
from mbd_core.multitf.states.layout import StateConfig
from research.alignment.states import TracingPlan, record_models
from research.ledger import distances as row_distances
from research.ledger.distances import (
    RowDistance,
    measure_rows,
    rank_correlation,
    ranks,
    read_distances,
    spearman,
    write_distances,
)
from research.ledger.plan import FITTED


def test_noise_that_is_fitted_is_nearer_than_the_rows(tiny_model_dir: Path, tmp_path: Path) -> None:
    plan = TracingPlan(
        task="ledger-mini", num_problems=32, seed=0, max_tokens=32, buffer_size=2, decoding={"tau_m2t": 0.3}
    )
    (traces,) = record_models({"base": read_folder(tiny_model_dir)}, plan, tmp_path / "traces")
    states = {r.name: replace(r.states, block_size=4) for r in (LEDGER_MBD, LEDGER_TF)}
    distances, noise = measure_rows(traces, states, draws=8, seed=0)
    found = {one.recipe: one for one in distances}
    assert list(found) == ["ledger-mbd", "ledger-tf", FITTED]
    fitted, chain = found[FITTED].mean_w1, found["ledger-mbd"].mean_w1
    assert fitted is not None and chain is not None and fitted.value < chain.value
    assert noise.source.startswith("base, ")


def test_the_distances_are_of_states_in_the_bases_blocks(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[StateConfig] = []

    def measured(traces: object, states: Mapping[str, StateConfig], **_: int) -> tuple[list[RowDistance], FittedNoise]:
        seen.extend(states.values())
        return [], FittedNoise(states=(((0.25, 1.0), 3),), source="a trace")

    monkeypatch.setattr(row_distances, "measure_rows", measured)
    row_distances.measure_inference(tmp_path, tiny_model_dir, num_problems=2)
    size = read_folder(tiny_model_dir).config.block_size
    assert len(seen) == 8 and {states.block_size for states in seen} == {size} != {LEDGER_MBD.states.block_size}
    row_distances.measure_inference(tmp_path, tiny_model_dir, num_problems=2)
    assert len(seen) == 8, "it is measured once"
    with pytest.raises(ValueError, match="is of 2 traced problems: give --traced 2"):
        row_distances.measure_inference(tmp_path, tiny_model_dir, num_problems=4)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    distances = [
        RowDistance(recipe="a", delta_r=Interval(value=0.5, low=0.4, high=0.6), mean_w1=None),
        RowDistance(
            recipe="b",
            delta_r=Interval(value=0.1, low=0.0, high=0.2),
            mean_w1=Interval(value=0.3, low=0.2, high=0.4),
        ),
    ]
    write_distances(tmp_path / "distances.parquet", distances)
    assert read_distances(tmp_path / "distances.parquet") == distances
    (tmp_path / "distances.parquet").write_text("no table")
    with pytest.raises(ValueError):
        read_distances(tmp_path / "distances.parquet")


def test_ranks_share_ties() -> None:
    assert ranks([3.0, 1.0, 3.0, 2.0]).tolist() == [3.5, 1.0, 3.5, 2.0]


def test_known_correlations_of_each_column() -> None:
    columns = np.array([[10, 20, 30, 40], [9, 7, 5, 1], [2, 2, 2, 2]], dtype=float).T
    assert spearman([1, 2, 3, 4], columns) == pytest.approx([1.0, -1.0, np.nan], nan_ok=True)
    scores = np.array([[7, 27, 2, 50, 28, 29, 20, 12, 6, 17]], dtype=float).T
    assert spearman([106, 100, 86, 101, 99, 103, 97, 113, 112, 110], scores) == pytest.approx([-29 / 165])


@pytest.mark.parametrize(("outcomes", "p"), [([4, 3, 2, 1], 2 / 24), ([4, 3, 2, 1, 0], 2 / 120)])
def test_the_p_of_a_perfect_order_is_two_of_all_orders(outcomes: list[float], p: float) -> None:
    drawn = np.repeat(np.array(outcomes, dtype=float)[:, None], 30, axis=1)
    found = rank_correlation(range(len(outcomes)), drawn)
    assert found.n == len(outcomes) and found.p_value == pytest.approx(p)
    assert (found.rho.value, found.rho.low, found.rho.high) == pytest.approx((-1.0, -1.0, -1.0))


def test_outcomes_that_are_not_told_apart_have_a_wide_interval() -> None:
    generator = np.random.default_rng(0)
    outcomes_RD = np.array([0.01, 0.02, 0.03, 0.04])[:, None] + generator.normal(0, 1, size=(4, 400))
    outcomes_RD[:, 0] = (0.01, 0.02, 0.03, 0.04)
    found = rank_correlation([1, 2, 3, 4], outcomes_RD)
    assert found.rho.value == pytest.approx(1.0)
    assert found.rho.low < -0.5


def test_too_few_rows_and_equal_ones_are_refused() -> None:
    with pytest.raises(ValueError, match="give 3 to 9"):
        rank_correlation([1, 2], np.ones((2, 5)))
    with pytest.raises(ValueError):
        rank_correlation([1, 2, 3], np.ones((3, 5)))
