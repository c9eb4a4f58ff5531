"""What is timed is the same work both ways, and its rows say so; the command's table and its refusals."""

import json
from pathlib import Path

import pytest
import torch
from family_models import FAMILIES, random_model

from benchmarks.commands import train as bench_train
from benchmarks.training import COLUMNS, loss_everywhere, measure_row, sample_batches
from mbd_core.multitf.states.mask import TrainingAttention
from mbd_core.multitf.step.loss import multitf_loss

CPU = torch.device("cpu")


def test_both_batches_are_the_same_sample() -> None:
    model = random_model(FAMILIES["sdar"]).double()
    batches = sample_batches(model, max_group=3, num_random=1, length=24)
    assert batches["separate"].input_ids.shape == (6, 48) and batches["shared"].input_ids.shape == (1, 7 * 24)
    assert bool((batches["shared"].input_ids[batches["shared"].labels >= 0] == model.config.mask_token_id).all())
    with torch.no_grad():
        separate, shared = (float(multitf_loss(model, batches[name])[0]) for name in ("separate", "shared"))
        everywhere = float(loss_everywhere(model, batches["shared"], TrainingAttention("auto", CPU)))
    assert shared == pytest.approx(separate, rel=1e-6)
    assert shared == pytest.approx(everywhere, rel=1e-6)


def test_a_row_has_both_rates_and_both_peaks() -> None:
    model = random_model(FAMILIES["sdar"])
    row = measure_row(model, TrainingAttention("auto", CPU), max_group=2, num_random=2, length=24, repeats=1)
    assert set(COLUMNS) <= set(row) and row["layouts"] == 4 and row["token_ratio"] == 1.6
    assert row["speedup"] == pytest.approx(row["shared_rate"] / row["separate_rate"])
    assert row["last_mlp_gain"] == pytest.approx(row["shared_rate"] / row["everywhere_rate"])
    gradients = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6
    assert row["separate_bytes"] > row["everywhere_bytes"] > row["shared_bytes"] > gradients
    assert all(p.grad is None for p in model.parameters())


def test_the_command_counts_and_writes_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    argv = ["--count", "--model", "sdar-8b", "--layouts", "2:0", "--length", "256", "--json", str(path)]
    assert bench_train(argv) == 0
    assert "sdar-8b: TFLOP of one sample's forward" in capsys.readouterr().out
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["model"], row["layouts"], row["length"]) == ("sdar-8b", 2, 256)
    assert bench_train(argv) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--model", "gpt"], "--model gpt must be one of tiny, sdar-null"),
        (["--layouts", "4"], "--layouts 4 must be G:N"),
        (["--layouts", "1:2"], "--layouts 1:2 must be G:N"),
        (["--length", "100"], "--length 100 is no whole number of blocks of 8"),
        (["--length", "0"], "must be a whole number of at least 1"),
    ],
)
def test_a_bad_command_line_is_one_sentence(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_train(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train: ") and sentence in line
