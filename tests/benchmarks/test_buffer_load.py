"""The benchmark of the block budget: what it counts, and what it computes."""

import json

import pytest
import torch

from benchmarks.buffer import BufferCase, engine_for, load_model_and_requests, measure_load, predict_load, run_at_load
from benchmarks.commands import buffer as main
from benchmarks.roofline import Machine
from mbd_core.engine.schedule.pacing import KEPT_MEASURES
from mbd_core.models.shapes import SHAPES

CPU = torch.device("cpu")


def test_a_budget_at_constant_load_is_the_buffer_that_it_leaves() -> None:
    """Tokens and forwards of three requests at once; the clock alone differs."""
    model, requests = load_model_and_requests("tiny-mbd", max_tokens=48, device=CPU, number=8)
    rows = {
        r["buffer"]: r
        for r in measure_load(
            model,
            requests,
            [BufferCase(size=1), BufferCase(size=2), BufferCase(size=4, budget=3), BufferCase(size=4, budget=6)],
            rows=3,
            answers=6,
            repeats=1,
            static=False,
        )
    }
    assert [rows[f"budget {n}"]["blocks_each"] for n in (3, 6)] == [1, 2]
    for fixed, budget in (("1", "budget 3"), ("2", "budget 6")):
        for key in ("tpf", "resident_blocks"):
            assert rows[fixed][key] == pytest.approx(rows[budget][key], rel=1e-9)
    assert 1.0 <= rows["1"]["resident_blocks"] < 1.1 < rows["2"]["resident_blocks"] <= 2.0
    assert rows["2"]["tpf"] > rows["1"]["tpf"] > 1
    assert max(rows[n]["over_best_fixed"] for n in ("1", "2")) == 1.0


def test_a_run_leaves_the_engine_idle_and_counts_its_window() -> None:
    model, requests = load_model_and_requests("tiny-mbd", max_tokens=16, device=CPU, number=4)
    engine, requests = engine_for(model, requests, BufferCase(size=2), rows=2, static=True)
    first, second = (run_at_load(engine, requests, answers=4) for _ in range(2))
    assert not engine.has_work and engine.scheduler.pool.num_free == engine.scheduler.pool.capacity
    assert (first.tokens, first.forwards, first.blocks) == (second.tokens, second.forwards, second.blocks)
    assert first.tps == first.tokens / first.seconds


def test_a_run_counts_the_same_on_a_slow_machine() -> None:
    """Nobody waits for its tokens, so no prompt is cut to keep steps short."""
    model, requests = load_model_and_requests("tiny-mbd", max_tokens=48, device=CPU, number=8)
    engine, requests = engine_for(model, requests, BufferCase(size=1), rows=3, static=False)
    first = run_at_load(engine, requests, answers=6)
    for _ in range(KEPT_MEASURES):
        engine.pacer.observe([slice(0, 16)], decodes=False, seconds=1000.0)
    second = run_at_load(engine, requests, answers=6)
    assert (first.tokens, first.forwards, first.blocks) == (second.tokens, second.forwards, second.blocks)


def test_the_prediction_switches_where_the_machine_saturates() -> None:
    """Bytes decide at one request, multiplications at many; only they are counted."""
    machine = Machine(bandwidth=3350e9, flops=989e12)
    table = predict_load(SHAPES["sdar-8b"], machine, {1: 3.0, 4: 6.0}, rows=[1, 64], prefix=512)
    assert [row["best"] for row in table] == [4, 1] and [row["budget"] for row in table] == [4, 64]
    assert table[0]["tps_4"] / table[0]["tps_1"] == pytest.approx(2.0, rel=0.05)
    assert table[1]["tps_4"] / table[1]["tps_1"] == pytest.approx(0.5, rel=0.25)


def test_the_job_prints_both_tables(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "buffer.json"
    size = ["--concurrency", "1,2", "--buffer", "1,2", "--budget", "2", "--max-tokens", "16", "--answers", "1"]
    assert main([*size, "--repeats", "1", "--predict", "sdar-8b", "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert text.count("| budget 2 |") == 2 and "Computed: sdar-8b" in text
    found = json.loads(out.read_text())
    assert [r["blocks_each"] for r in found["rows"]] == [1, 2, 2, 1, 2, 1] and len(found["computed"]) == 2
    assert main(["--predict", "sdar-9b"]) == 2
    assert main(["--budget", "0"]) == 2
