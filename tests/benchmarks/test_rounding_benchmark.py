"""What rounded weights change in logits, and at which positions it is counted."""

from pathlib import Path

import pytest
import torch

from benchmarks import rounding as measured
from benchmarks.commands import rounding
from benchmarks.rounding import compared_sequences, logit_error
from mbd_core.models.shapes import SHAPES


def test_sequences_are_those_of_the_seed_and_ask_for_half_of_each_solution() -> None:
    config = SHAPES["tiny-llada2"]
    sequences = compared_sequences(config, None, count=3, seed=5)
    assert sequences == compared_sequences(config, None, count=3, seed=5)
    assert sequences != compared_sequences(config, None, count=3, seed=6)
    special = {config.mask_token_id, *config.eos_token_ids}
    for sequence in sequences:
        solution = range(len(sequence.tokens) // 2, len(sequence.tokens))
        assert sequence.positions == sorted(set(sequence.positions)) and set(sequence.positions) <= set(solution)
        assert len(sequence.positions) == len(solution) // 2 and not special & set(sequence.tokens)


def test_an_existing_file_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measured, "rounding_rows", lambda *_, **__: pytest.fail("a model was measured"))
    (tmp_path / "a.json").write_text("a user's")
    assert rounding(["--model", "tiny-mbd", "--json", str(tmp_path / "a.json")]) == 2
    assert "a.json exists already" in capsys.readouterr().err
    assert (tmp_path / "a.json").read_text() == "a user's"


def test_logit_error_counts_what_changed() -> None:
    wide = torch.tensor([[1.0, 2.0, 0.0], [3.0, 1.0, 0.0]])
    error = logit_error(wide, torch.tensor([[2.5, 2.0, 0.0], [3.0, 1.0, 0.0]]))
    assert (error.max_abs, error.mean_abs, error.top1_agreement, error.positions) == (1.5, 0.25, 0.5, 2)
    with pytest.raises(ValueError):
        logit_error(wide, wide[:1])
