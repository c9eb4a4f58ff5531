"""The benchmarks: what they measure adds up, both jobs run end to end, bad arguments are one sentence. No timings."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jobs import bench_decoders, bench_engine
from mbd_core.bench.plain_loops import multi_bd
from mbd_core.bench.step_timing import StepCase, filled_engine, measure_step
from mbd_core.bench.tables import buffer_ratios, host_growth, interleaved, markdown, write_json
from mbd_core.decoding.decoding_config import T2T, DecodingConfig
from mbd_core.decoding.request import Request
from mbd_core.engine.engine import Engine, EngineConfig
from mbd_core.models.decoder import Decoder
from mbd_core.models.shapes import SHAPES, random_model

CPU = torch.device("cpu")


def tiny(name: str) -> Decoder:
    return random_model(SHAPES[name], device=CPU, dtype=torch.float64, std=0.2)


def test_the_shapes_are_the_published_sizes() -> None:
    published = {"llada2-mini": 16.256, "llada2-flash": 102.89, "sdar-8b": 8.191, "llada-8b": 8.02, "dream-7b": 7.62}
    for name, billions in published.items():
        assert SHAPES[name].num_parameters / 1e9 == pytest.approx(billions, rel=1e-3), name
    assert SHAPES["sdar-50m"].num_parameters == pytest.approx(50e6, rel=0.02)
    assert SHAPES["sdar-50m"].block_size == 32


@pytest.mark.parametrize("name", ["tiny-sdar", "tiny-llada2", "tiny-llada", "tiny-dream", "sdar-null"])
def test_a_random_model_has_its_shape_and_dtype(name: str) -> None:
    model = random_model(SHAPES[name], device=CPU, dtype=torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == SHAPES[name].num_parameters
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(p.isfinite().all() for p in model.parameters())
    assert all(b.dtype == torch.float32 for b_name, b in model.named_buffers() if "expert_bias" in b_name)


def test_a_tied_random_model_stays_tied() -> None:
    model = random_model(replace(SHAPES["tiny-sdar"], tie_word_embeddings=True), device=CPU, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("shape", ["tiny-llada", "tiny-dream"])
@pytest.mark.parametrize("length", [5, 8, 11])
@pytest.mark.parametrize(
    "config",
    [
        DecodingConfig(block_size=4, buffer_size=3, tau_m2t=0.3, prompt_attention="full"),
        DecodingConfig(block_size=4, tau_m2t=0.3, prompt_attention="full"),
        DecodingConfig(block_size=4, buffer_size=3, tau_m2t=0.3),
        DecodingConfig(block_size=4, buffer_size=2, tau_m2t=0.3, t2t=T2T(tau=0.5)),
    ],
    ids=["pipelined", "cache only", "block-causal", "t2t"],
)
def test_the_plain_d2f_loop_is_the_engine(shape: str, length: int, config: DecodingConfig) -> None:
    model = tiny(shape)
    prompt = [(7 * i * i + 3 * i + 5) % 250 for i in range(length)]
    plain = multi_bd(model, prompt, 18, config, ignore_eos=True)
    request = Request(request_id="a", prompt=tuple(prompt), max_tokens=18, decoding=config, ignore_eos=True)
    engine = Engine(model, EngineConfig(max_rows=1, buffer_size=3, block_size=4))
    output = engine.generate([request])[0]
    assert plain.tokens == list(output.tokens) and len(plain.tokens) == 18
    assert plain.num_forwards == output.counts.num_forwards
    assert plain.num_store_forwards == output.counts.num_store_forwards


def test_the_plain_d2f_loop_refuses_what_it_has_not() -> None:
    with pytest.raises(ValueError, match="fallback"):
        multi_bd(tiny("tiny-llada"), [1], 4, DecodingConfig(block_size=4, fallback="margin"))


@pytest.mark.parametrize("static", [False, True])
def test_a_filled_engine_decodes_with_all_slots_in_use(static: bool) -> None:
    case = StepCase(rows=3, buffer_size=2, prefix=64, steps=3, static=static, trace=True)
    model = random_model(SHAPES["sdar-null"], device=CPU, dtype=torch.float32)
    engine = filled_engine(model, case)
    times = measure_step(engine, case)
    assert times.num_tokens == 3 * 2 * 32, "every slot of every row is in the forward"
    assert 0 < times.num_logits <= times.num_tokens
    for value in (times.step, times.forward, times.layout, times.recorder):
        assert value is not None and value > 0
    assert engine.num_running == 3
    engine.check_integrity()
    committed = [s.committed for s in engine.scheduler.running.values()]
    assert all(64 <= c < 64 + case.num_tokens(32) for c in committed)


def test_measuring_changes_no_token() -> None:
    """A forward that is run again stores the same keys: the measured engine goes on as an unmeasured one."""
    case = StepCase(rows=2, buffer_size=2, prefix=32, steps=4)
    model = random_model(SHAPES["sdar-null"], device=CPU, dtype=torch.float32, std=0.5)
    tokens = []
    for measured in (True, False):
        torch.manual_seed(0)
        engine = filled_engine(model, case)
        if measured:
            measure_step(engine, case)
        while engine.num_running == 2 and min(s.committed for s in engine.scheduler.running.values()) < 32 * 3:
            engine.step()
        tokens.append([s.tokens[: 32 * 3] for s in engine.scheduler.running.values()])
    assert tokens[0] == tokens[1]


def test_runs_take_turns_and_begin_in_turn() -> None:
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        return float(len(order))

    taken = interleaved({name: lambda name=name: run(name) for name in "abc"}, repeats=3)  # type: ignore[misc]
    assert "".join(order) == "abcbcacab"
    assert taken["a"] == [1.0, 6.0, 8.0]
    with pytest.raises(ValueError, match="repeats=0"):
        interleaved({}, repeats=0)


def test_ratios_compare_like_with_like() -> None:
    def row(rows: int, buffer_size: int, step: float, host: float) -> dict[str, object]:
        return {
            "model": "m",
            "rows": rows,
            "buffer_size": buffer_size,
            "prefix": 64,
            "step_seconds": step,
            "host_seconds": host,
            "forward_seconds": 1.0,
        }

    table = [row(1, 1, 2.0, 1.0), row(1, 2, 3.0, 1.0), row(8, 2, 9.0, 3.0)]
    (ratio,) = buffer_ratios(table)
    assert (ratio["rows"], ratio["step_over_single"], ratio["paper"]) == (1, 1.5, 1.24)
    (growth,) = host_growth(table)
    assert (growth["buffer_size"], growth["from_rows"], growth["to_rows"]) == (2, 1, 8)
    assert (growth["growth"], growth["growth_beside_forward"]) == (3.0, 4.0)


def test_a_table_shows_milliseconds_and_gaps() -> None:
    text = markdown([{"a": 0.0015, "b": True}, {"a": 0.002}], {"a": "step (ms)|.1f", "b": "ok"})
    assert text.splitlines() == ["| step (ms) | ok |", "|---|---|", "| 1.5 | yes |", "| 2.0 | - |"]


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"x": object()})
    assert not list(tmp_path.iterdir())


def test_the_engine_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "engine.json"
    argv = ["--model", "sdar-null", "--rows", "1,2", "--buffer", "1,2", "--prefix", "64", "--steps", "2"]
    assert bench_engine.main([*argv, "--device", "cpu", "--trace", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [(r["rows"], r["buffer_size"]) for r in report["rows"]] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    for row in report["rows"]:
        assert (row["model"], row["prefix"], row["backend"]) == ("sdar-null", 64, "reference")
        assert row["device"].startswith("cpu")
        assert math.isclose(row["step_over_forward"], row["step_seconds"] / row["forward_seconds"])
        assert math.isclose(row["step_over_floor"], row["step_seconds"] / row["floor_seconds"])
        assert math.isclose(row["tps"], row["rows"] * row["tpf"] / row["step_seconds"])
        assert row["trace_cost"] > 0
    assert len(report["buffer_ratios"]) == len(report["host_growth"]) == 2
    shown = capsys.readouterr().out
    assert "| sdar-null | 2 | 2 | 64 |" in shown and "8.78" in shown


def test_the_engine_benchmark_takes_a_folder(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--model", str(tiny_model_dir), "--rows", "1", "--buffer", "1", "--prefix", "16", "--steps", "1"]
    assert bench_engine.main([*argv, "--device", "cpu", "--tpf", "2.5"]) == 0
    assert "| 2.50 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--model", "sdar-9b"], "sdar-9b"),
        (["--model", "llada2-flash", "--dtype", "float32"], "GB"),
        (["--model", "sdar-null", "--prefix", "64,33"], "--prefix 33"),
        (["--model", "sdar-null", "--prefix", "32768"], "positions"),
        (["--model", "sdar-null", "--attention", "magic"], "magic"),
        (["--model", "sdar-null", "--fp8", "experts"], "--fp8 experts"),
        (["--model", "sdar-null", "--eager"], "--eager"),
        (["--model", "sdar-null", "--json", "/proc/none/file.json"], "/proc/none/file.json cannot be written"),
        (["--model", "sdar-null", "--json", "/"], "it is a folder"),
        (["--device", "tpu"], "tpu"),
        (["--device", "meta"], "meta"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is found before anything is measured."""
    monkeypatch.setattr(bench_engine, "measure_machine", lambda *_: pytest.fail("the machine was measured"))
    if argv[0] != "--device":
        argv = [*argv, "--device", "cpu"]
    assert bench_engine.main([*argv, "--rows", "1", "--buffer", "1", "--steps", "1"]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("bench_engine:")]
    assert named in line


@pytest.mark.parametrize(
    "argv", [["--rows", "0"], ["--buffer", "1,x"], ["--steps", "0"], ["--tpf", "nan"], ["--static", "--dynamic"]]
)
def test_bad_arguments_end_with_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_engine.main(argv)
    assert ended.value.code == 2


def test_the_decoder_benchmark_runs_every_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "decoders.json"
    argv = ["--requests", "2", "--max-tokens", "16", "--repeats", "1", "--json", str(out)]
    assert bench_decoders.main(argv) == 0
    rows = json.loads(out.read_text())["rows"]
    assert all(r["same_tokens_float64"] for r in rows)
    assert {r["model"] for r in rows} >= {"tiny-bd", "tiny-mbd", "sdar (random)", "dream (random)"}
    methods = {r["method"].split(",")[0] for r in rows}
    assert methods >= {"SingleBD", "MultiBD", "T2T", "DMax", "D2F", "Fast-dLLM", "dLLM-Cache", "LocalLeap"}
    assert methods >= {"BlockBatch", "vanilla LLaDA"}
    for row in rows:
        assert row["nfe"] > 0 and row["tokens"] > 0
        for name in ("plain", "engine_1", "engine_n"):
            assert math.isclose(row[f"{name}_tps"], row["tokens"] / row[f"{name}_seconds"])
        assert math.isclose(row["engine_n_over_plain"], row["plain_seconds"] / row["engine_n_seconds"])
    assert "same tokens: yes" in capsys.readouterr().out


def test_other_tokens_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = bench_decoders.plain_run

    def wrong(model: Decoder, request: Request) -> object:
        run = right(model, request)
        return type(run)([t + 1 for t in run.tokens], run.finish_reason, run.num_forwards)

    monkeypatch.setattr(bench_decoders, "plain_run", wrong)
    argv = ["--requests", "1", "--max-tokens", "8", "--repeats", "1", "--models", "sdar", "--methods", "SingleBD"]
    assert bench_decoders.main(argv) == 1
    assert "same tokens: no: sdar (random) SingleBD" in capsys.readouterr().out


@pytest.mark.parametrize(("argv", "named"), [(["--models", "x"], "--models"), (["--fixtures", "nowhere"], "nowhere")])
def test_nothing_to_decode_is_one_sentence(argv: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_decoders.main(argv) == 2
    assert named in capsys.readouterr().err


def test_fixtures_give_the_models(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = Path(request.config.getoption("--fixtures"))
    if not any(folder.glob("*/model.safetensors")):
        pytest.skip(f"no fixtures in {folder}")
    out = tmp_path / "decoders.json"
    argv = ["--fixtures", str(folder), "--requests", "2", "--max-tokens", "8", "--repeats", "1", "--json", str(out)]
    assert bench_decoders.main([*argv, "--methods", "SingleBD", "dual cache", "pipelined"]) == 0
    models = {r["model"] for r in json.loads(out.read_text())["rows"]}
    assert {name.rsplit("-", 1)[0] for name in models} >= {"sdar", "llada2", "llada", "dream"}
    assert not any("random" in name for name in models)


def test_jobs_print_their_help(capsys: pytest.CaptureFixture[str]) -> None:
    for job in (bench_engine, bench_decoders):
        with pytest.raises(SystemExit) as ended:
            job.main(["--help"])
        assert ended.value.code == 0
    assert "--buffer" in capsys.readouterr().out
