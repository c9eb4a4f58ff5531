"""The shared clean stream beside separate sequences: operations and padding counted, steps timed."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chat_rows import chat, write_rows
from family_models import FAMILIES, random_model

from benchmarks.commands import train as bench_train
from benchmarks.training import (
    COLUMNS,
    FLEX_BLOCK,
    computed_pairs,
    count_row,
    loss_everywhere,
    matrix_flops,
    measure_row,
    mlp_flops,
    padding_row,
    pair_flops,
    sample_batches,
    sample_cost,
    token_ratio,
)
from jobs import prepare_data
from mbd_core.models.shapes import SHAPES
from mbd_core.multitf.config import TrainConfig
from mbd_core.multitf.data.example import Example
from mbd_core.multitf.states.layout import GroupLayout, StateConfig, layout_set
from mbd_core.multitf.states.mask import dual_stream_sees
from mbd_core.multitf.states.training_attention import TrainingAttention
from mbd_core.multitf.step import compute
from mbd_core.multitf.step.loss import multitf_loss
from mbd_core.multitf.step.trainer import Trainer
from mbd_core.ops.attention.whole import block_mask

SMALL = replace(
    SHAPES["sdar-50m"], num_layers=2, hidden_size=10, intermediate_size=20, num_heads=3, num_kv_heads=1, head_dim=4
)


def test_a_token_and_a_pair_cost_what_their_products_do() -> None:
    attention = 10 * 12 + 2 * 10 * 4 + 12 * 10  # q, k and v, o
    assert mlp_flops(SMALL, 1) == 2 * 3 * 10 * 20
    assert matrix_flops(SMALL) == 2 * 2 * (attention + 3 * 10 * 20)
    assert pair_flops(SMALL) == 2 * 4 * 12


def test_gemma_layers_are_counted_as_they_are() -> None:
    """A global layer has other heads; a layer with a window costs the same at any depth; experts lie beside an MLP."""
    config = SHAPES["tiny-diffusion-gemma"]  # of its three layers the last one is global
    assert config.gemma is not None and config.moe is not None and config.gemma.global_layers == (2,)
    of_window, of_all = (c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads) for c in map(config.of_layer, (1, 2)))
    moe = config.moe
    mlp = 3 * config.intermediate_size + moe.num_experts + 3 * moe.experts_per_token * moe.intermediate_size
    assert matrix_flops(config) == 2 * config.hidden_size * (2 * of_window + of_all + 3 * mlp)
    assert pair_flops(config) == 4 * config.num_heads * config.gemma.global_head_dim


def test_two_blocks_in_one_group_by_hand() -> None:
    """Noisy blocks see 1 and 2 noisy ones, clean blocks 1 and 2 clean ones: 6 of 16; the clean ones count once."""
    one, two = GroupLayout((2,)), GroupLayout((1, 1))
    assert computed_pairs([one], FLEX_BLOCK, "flex") == 6 * FLEX_BLOCK**2
    assert computed_pairs([one], FLEX_BLOCK, "dense") == 16 * FLEX_BLOCK**2
    assert computed_pairs([two], FLEX_BLOCK, "flex") == (2 + 1 + 3) * FLEX_BLOCK**2  # alone; one clean; clean
    assert computed_pairs([one, two], FLEX_BLOCK, "flex") == (3 + 3 + 3) * FLEX_BLOCK**2
    cost = sample_cost(SMALL, [one, two], FLEX_BLOCK, attention="flex", shared=True)
    assert cost.tokens == 6 * FLEX_BLOCK and cost.pairs == 9 * FLEX_BLOCK**2
    everywhere = matrix_flops(SMALL) - mlp_flops(SMALL, 1)
    assert cost.flops == cost.tokens * everywhere + cost.pairs * pair_flops(SMALL)
    apart = sample_cost(SMALL, [one, two], FLEX_BLOCK, attention="dense", shared=False)
    assert apart.tokens == 8 * FLEX_BLOCK and apart.pairs == 2 * 16 * FLEX_BLOCK**2


@pytest.mark.parametrize(("size", "num_blocks"), [(4, 70), (32, 11), (48, 7), (160, 3)])
def test_blocks_are_those_of_the_block_mask(size: int, num_blocks: int) -> None:
    """Also where a diffusion block is no part of a block of the mask, or larger than one."""
    layouts = layout_set(num_blocks, max_group=2, num_random=1, rng=random.Random(0))
    blocks = torch.arange(num_blocks).repeat_interleave(size)
    stream = torch.tensor([1, 2, 3, 0]).repeat_interleave(len(blocks))
    firsts = [torch.tensor(layout.first_blocks()).repeat_interleave(size) for layout in layouts]
    numbers = (stream, blocks.repeat(4), torch.cat([*firsts, blocks + 1]))
    sees = dual_stream_sees(*(n[None] for n in numbers))
    mask = block_mask(sees, batch=1, length=len(stream), device=torch.device("cpu"))
    computed = int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
    assert computed_pairs(layouts, size, "flex") == computed * FLEX_BLOCK**2


def test_sharing_pays_with_flex_at_any_length_and_dense_at_none() -> None:
    rows = [count_row(SHAPES["sdar-8b"], max_group=4, num_random=3, length=length) for length in (2048, 4096)]
    for row in rows:
        assert row["layouts"] == 12 and row["token_ratio"] == token_ratio(12) == pytest.approx(24 / 13)
        assert row["separate_tokens"] / row["shared_tokens"] == pytest.approx(row["token_ratio"])
        assert row["flex_gain"] == pytest.approx(row["token_ratio"], rel=0.02)
    assert [round(row["separate_dense_tflop"]) for row in rows] == [787, 1811]
    assert [round(row["shared_dense_tflop"]) for row in rows] == [780, 2396]
    with pytest.raises(ValueError, match="32"):
        count_row(SHAPES["sdar-8b"], max_group=2, num_random=0, length=100)


def test_a_row_by_hand() -> None:
    row = padding_row([8, 4, 4, 8], batch_size=4, micro_batch=2, pack=8)
    assert (row["separate_sequences"], row["packed_sequences"]) == (4, 3)
    assert row["separate_padding"] == 0.0  # lengths of one step are sorted
    assert row["packed_padding"] == 0.0
    row = padding_row([8, 4, 4, 8], batch_size=4, micro_batch=4, pack=8)
    assert (row["separate_padding"], row["packed_padding"]) == (0.25, 0.0)
    with pytest.raises(ValueError, match="5"):
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
        (["--length", "0"], "whole numbers of at least 1"),
    ],
)
def test_a_bad_command_line_is_one_sentence(
    argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_train(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train: ") and sentence in line


def test_compiled_updates_are_timed_beside_eager_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(compute, "BACKEND", "eager")
    argv = ["--compiled", "--model", "tiny", "--length", "16,24", "--repeats", "1", "--lora", "2"]
    assert bench_train([*argv, "--json", str(tmp_path / "rows.json")]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [(row["length"], row["lora"]) for row in rows] == [(16, 2), (24, 2)]
    for row in rows:
        assert row["gain"] == pytest.approx(row["eager_seconds"] / row["compiled_seconds"])
        assert row["first_seconds"] > 0
    assert "updates of four samples on cpu" in capsys.readouterr().out


def test_options_without_effect_on_updates_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_train(["--lora", "2", "--count", "--model", "tiny"]) == 2
    assert "--lora has no meaning without --compiled; leave it out" in capsys.readouterr().err
    for others, sentence in (
        (["--count"], "--count and --compiled make different tables; leave one of them out"),
        (["--layouts", "2:0"], "--layouts has no meaning with --compiled, which times updates of one layout"),
    ):
        assert bench_train(["--compiled", "--model", "tiny", *others]) == 2
        assert sentence in capsys.readouterr().err
