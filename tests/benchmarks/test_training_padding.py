"""The padding that packing saves, counted: by hand, as a trainer computes it, and as the command prints it."""

import json
import random
from pathlib import Path

import pytest
from chat_rows import chat, write_rows
from family_models import FAMILIES, random_model

from benchmarks.commands import train as bench_train
from benchmarks.training import padding_row
from jobs import prepare_data
from mbd_core.multitf.config import TrainConfig
from mbd_core.multitf.data.encoding import Example
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.step.trainer import Trainer


def test_a_row_by_hand() -> None:
    row = padding_row([8, 4, 4, 8], batch_size=4, micro_batch=2, pack=8)
    assert (row["separate_sequences"], row["packed_sequences"]) == (4, 3)
    assert row["separate_padding"] == 0.0  # lengths of one step are sorted
    assert row["packed_padding"] == 0.0
    row = padding_row([8, 4, 4, 8], batch_size=4, micro_batch=4, pack=8)
    assert (row["separate_padding"], row["packed_padding"]) == (0.25, 0.0)
    with pytest.raises(ValueError, match="4 training samples are fewer than a batch of 5"):
        padding_row([8, 4, 4, 8], batch_size=5, micro_batch=4, pack=8)


@pytest.mark.parametrize("pack", [None, 48])
def test_it_is_what_a_trainer_computes(pack: int | None) -> None:
    rng = random.Random(0)
    samples = [Example(tuple(rng.randrange(2, 300) for _ in range(4 * rng.randrange(2, 12))), 3) for _ in range(16)]
    train = TrainConfig(
        steps=2, batch_size=8, lr=1e-3, precision="float32", optimizer="adamw", micro_batch=3, pack=pack
    )
    trainer = Trainer(random_model(FAMILIES["sdar"]), samples, StateConfig(block_size=4, max_group=2), train)
    done = [trainer.step() for _ in range(2)]
    row = padding_row([len(s.tokens) for s in samples], batch_size=8, micro_batch=3, pack=48)
    found = 1 - sum(m.tokens for m in done) / sum(m.positions for m in done)
    counted = row["separate_padding" if pack is None else "packed_padding"]
    assert counted == pytest.approx(found, abs=0.04)  # a trainer leaves out each sample's last clean block


def test_the_command_counts_prepared_data(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path / "chats.jsonl", [chat(n) for n in range(12)])
    assert prepare_data.main([str(rows), "--model", str(tiny_model_dir), "--out", str(tmp_path / "data")]) == 0
    argv = ["--data", str(tmp_path / "data"), "--model", "tiny", "--batch", "4"]
    argv += ["--pack", "64,256", "--micro-batch", "2"]
    assert bench_train([*argv, "--json", str(tmp_path / "rows.json")]) == 0
    assert "tiny: 12 samples in blocks of 8, 4 a step" in capsys.readouterr().out
    found = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["pack"] for row in found] == [64, 256] and found[1]["packed_sequences"] < 4
    assert bench_train(["--data", str(tmp_path)]) == 2
    assert "holds no prepared training data" in capsys.readouterr().err
