"""The rule of what counts as shown, on rows of which the answer is known."""

from pathlib import Path

import pytest
from drawn_study import study_cells, study_table

from research.ledger.claims import CLAIM_TAU, CLAIMS, ORDERING, JudgedClaim, judge
from research.ledger.plan import LOW_TAUS
from research.ledger.rows import StudyCell, bootstrap_means, read_rows, write_rows


def verdicts(tmp_path: Path, recipes: dict[str, tuple[float, int]]) -> dict[str, JudgedClaim]:
    write_rows(tmp_path / "rows.parquet", [study_cells(recipes)])
    rows = read_rows([tmp_path / "rows.parquet"])
    return {one.claim.text: one for one in judge(ORDERING, bootstrap_means(rows, num_draws=200))}


def test_clear_rows_show_the_claims_and_the_reverse_contradicts_them(tmp_path: Path) -> None:
    better = verdicts(tmp_path, {"base": (0.3, 60), "ledger-tf": (0.4, 50), "ledger-mbd": (0.95, 30)})
    for text in ("MBD is more accurate than training-free MultiBD", "and fewer than the control"):
        assert better[text].verdict == "shown" and better[text].difference.low > 0
    worse = verdicts(tmp_path, {"base": (0.95, 30), "ledger-tf": (0.95, 30), "ledger-mbd": (0.3, 60)})
    for text in ("and more than the control with the same compute", "MBD's AUP is above training-free MultiBD's"):
        assert worse[text].verdict == "contradicted" and worse[text].difference.high < 0
    assert worse["MBD loses nothing against the base under SingleBD"].verdict == "contradicted"


def test_rows_that_are_alike_show_nothing(tmp_path: Path) -> None:
    found = verdicts(tmp_path, {"base": (0.8, 40), "ledger-tf": (0.8, 40), "ledger-mbd": (0.8, 40)})
    assert found["and more than the control with the same compute"].verdict == "not shown"
    assert found["MBD takes fewer forwards than training-free MultiBD"].verdict == "not shown"


def test_the_first_claim_sets_singlebd_of_the_base_above_multibd(tmp_path: Path) -> None:
    found = verdicts(tmp_path, {"base": (0.5, 40), "ledger-tf": (0.5, 40), "ledger-mbd": (0.5, 40)})
    one = found["training-free MultiBD loses accuracy: the base under SingleBD is above it"]
    rows = read_rows([tmp_path / "rows.parquet"])
    means = {
        cell.buffer_size: rows.correct[cell].mean()
        for cell in rows.cells
        if cell.recipe == "base" and cell.tau_m2t == 0.9
    }
    assert one.difference.value == pytest.approx(100 * (means[1] - means[2]))


def test_a_claim_whose_cells_are_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        verdicts(tmp_path, {"base": (0.5, 40), "ledger-tf": (0.5, 40)})


def test_the_ablation_compares_every_other_row_with_the_method() -> None:
    claims = CLAIMS["ablation"]
    assert len(claims) == 14 and {claim.first for claim in claims} == {"ledger-mbd"}
    assert len({claim.second for claim in claims}) == 7


def test_a_low_threshold_is_compared_with_mbd_at_its_own(tmp_path: Path) -> None:
    low = {StudyCell("base", 1, tau): tau for tau in LOW_TAUS}
    mbd = {StudyCell("ledger-mbd", 2, CLAIM_TAU): 0.95}
    table = study_table({**low, **mbd}, {**dict.fromkeys(low, 40), **dict.fromkeys(mbd, 30)})
    write_rows(tmp_path / "rows.parquet", [table])
    drawn = bootstrap_means(read_rows([tmp_path / "rows.parquet"]), num_draws=200)
    judged = judge(CLAIMS["thresholds"], drawn)
    assert len(judged) == 2 * len(LOW_TAUS) and {one.verdict for one in judged} == {"shown"}
    for one in judged:
        cells = StudyCell("ledger-mbd", 2, CLAIM_TAU), StudyCell("base", 1, one.claim.tau)
        means = [float(drawn.mean(cell, one.claim.measure)[0]) for cell in cells]
        difference = means[0] - means[1] if one.claim.measure == "accuracy" else means[1] - means[0]
        assert one.difference.value == pytest.approx(difference)
