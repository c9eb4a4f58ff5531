"""Traces against their own rows: what is recorded is read back, and every number is what a literal count gives."""

import json
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from simulated_trace import EOS, SIZE, simulate

from jobs import trace_report
from mbd_core.decoding.decoding_config import T2T
from mbd_core.decoding.request import StepTrace
from mbd_core.decoding.slot_state import SlotState
from mbd_core.trace.measures import Run, block_lives, make_run, measure, ratios_by_rank
from mbd_core.trace.recorder import STATES, TraceRecorder, read_trace, read_trace_table
from mbd_core.trace.replay import make_side, write_replay

PROMPTS = (11, 8, 20, 3, 17)


def run_of(trace: TraceRecorder, name: str = "run") -> Run:
    return make_run(trace.table(), name=name)


def test_states_are_the_buffers() -> None:
    assert [s.name for s in SlotState] == list(STATES[: len(SlotState)])
    assert [int(s) for s in SlotState] == list(range(len(SlotState)))


@pytest.mark.parametrize("detail", [False, True])
def test_rows_come_back_as_they_were(tmp_path: Path, detail: bool) -> None:
    trace = simulate(3, prompts=PROMPTS, detail=detail)
    trace.write(tmp_path / "a" / "trace.parquet")
    rows = read_trace(tmp_path / "a" / "trace.parquet")
    assert rows == trace.rows and len(rows) > 100
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["trace.parquet"]
    assert all((row.tokens is not None) == (row.confidences is not None) == detail for row in rows)
    if detail:
        assert all(row.tokens == (-1,) * SIZE for row in rows if row.state == "DUMMY")
        assert all(
            (t < 0) == (c == 0) for r in rows if r.block > 2 for t, c in zip(r.tokens, r.confidences, strict=True)
        )


def test_a_step_is_copied() -> None:
    trace, states, ratios = TraceRecorder(), np.array([[1, 0]], dtype=np.int8), np.array([[0.5, 1.0]])
    counts = np.array([[3, 0]])
    trace.add(7, ["a"], [4], states, ratios, counts, counts, None, None)
    for array in (states, ratios, counts):
        array[:] = 2
    first, second = trace.rows
    assert first == StepTrace(
        request_id="a", step=7, slot=0, block=4, state="ACTIVE", mask_ratio=0.5, accepted=3, edited=3
    )
    assert (second.block, second.slot, second.state) == (5, 1, "DUMMY")


def test_recording_costs_little() -> None:
    """A step of a 50M-parameter model takes tens of milliseconds on a CPU; 3 % of 10 ms are 300 microseconds."""
    n, slots = 8, 4
    small, tokens = np.zeros((n, slots)), np.zeros((n, slots, 32))
    ids, blocks = [str(i) for i in range(n)], list(range(n))
    costs = []
    for _ in range(5):
        trace, started = TraceRecorder(True), time.perf_counter()
        for step in range(100):
            trace.add(step, ids, blocks, small, small, small, small, tokens, tokens)
        costs.append((time.perf_counter() - started) / 100)
    assert min(costs) < 300e-6


def test_parts_rotate_and_memory_stays_bounded(tmp_path: Path) -> None:
    whole = simulate(2, prompts=PROMPTS).rows
    trace = simulate(2, prompts=PROMPTS, recorder=TraceRecorder(True, folder=tmp_path, rows_per_file=40))
    assert len(trace.rows) < 40
    trace.close()
    assert trace.rows == []
    assert read_trace(tmp_path) == whole
    parts = sorted(p.name for p in tmp_path.iterdir())
    assert len(parts) > 4

    again = TraceRecorder(True, folder=tmp_path, rows_per_file=40, max_files=3)
    simulate(2, prompts=PROMPTS, recorder=again)
    again.close()
    kept = sorted(p.name for p in tmp_path.iterdir())
    assert len(kept) == 3 and kept[0] > parts[-1]
    in_files = [row for name in kept for row in read_trace(tmp_path / name)]
    cut = {row.request_id for row in in_files if row.step == in_files[0].step}
    assert cut and read_trace(tmp_path) == [row for row in in_files if row.request_id not in cut]


def test_a_part_that_cannot_be_written_ends_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "parts"
    recorder = TraceRecorder(True, folder=folder, rows_per_file=40)
    folder.rmdir()
    folder.write_text("in the way")
    simulate(2, prompts=PROMPTS, recorder=recorder)
    assert "trace rows are lost" in caplog.text
    assert len(recorder.rows) < 40


@pytest.mark.parametrize("buffer_size", [1, 2, 4])
@pytest.mark.parametrize("t2t", [None, T2T(tau=0.7, max_edits=4)])
def test_measures_are_a_literal_count_of_the_rows(buffer_size: int, t2t: T2T | None) -> None:
    trace = simulate(buffer_size, prompts=PROMPTS, t2t=t2t)
    rows = trace.rows
    forwards: dict[tuple[str, int], list[StepTrace]] = {}
    for row in rows:
        forwards.setdefault((row.request_id, row.step), []).append(row)
    active = [[r for r in of if r.state == "ACTIVE"] for of in forwards.values()]
    got = measure(run_of(trace))

    assert got.num_requests == len(PROMPTS) and got.num_slots == buffer_size and got.block_size == SIZE
    assert got.num_forwards == len(forwards)
    assert got.num_accepted == sum(r.accepted for r in rows) == 45 * len(PROMPTS)
    assert got.num_edited == sum(r.edited for r in rows)
    assert (got.num_edited > 0) == (t2t is not None)
    assert got.num_store_only == sum(not of for of in active)
    shares = [sum(len(of) == n for of in active) / len(active) for n in range(buffer_size + 1)]
    assert got.active_blocks.histogram == pytest.approx(shares)
    assert got.token_efficiency == pytest.approx(got.num_accepted / (len(forwards) * buffer_size * SIZE))
    resident = sum(r.state != "DUMMY" for r in rows)
    assert got.resident_efficiency == pytest.approx(got.num_accepted / (resident * SIZE))
    for rank, spread in enumerate(got.mask_ratios):
        ratios = [of[rank].mask_ratio for of in active if len(of) > rank]
        assert (spread.n, spread.mean) == (len(ratios), pytest.approx(np.mean(ratios)))
    gaps = [of[1].mask_ratio - of[0].mask_ratio for of in active if len(of) > 1]
    assert bool(gaps) == bool(got.mask_ratio_gaps) == (buffer_size > 1)
    if gaps:
        assert got.mask_ratio_gaps[0].mean == pytest.approx(np.mean(gaps))
    stays = {
        key: sum((r.request_id, r.block) == key and r.state != "DUMMY" for r in rows)
        for key in {(r.request_id, r.block) for r in rows if r.state != "DUMMY"}
    }
    assert got.lifetimes is not None and got.num_unfinished == 0
    assert (got.lifetimes.n, got.lifetimes.mean) == (len(stays), pytest.approx(np.mean(list(stays.values()))))


def test_single_block_diffusion_stores_each_block_in_a_bubble() -> None:
    single, multi = (measure(run_of(simulate(n, prompts=PROMPTS))) for n in (1, 4))
    assert single.waiting is not None and single.waiting.histogram == (0.0, 1.0)
    assert single.num_store_only == single.waiting.n
    assert multi.store_only_share < single.store_only_share / 2
    assert multi.tpf > single.tpf


def test_blocks_behind_an_eos_never_left() -> None:
    trace = simulate(4, prompts=(11,), eos_at=20, seed=1)
    (request,) = run_of(trace).requests
    lives = block_lives(request)
    assert {life.block for life in lives if life.left} == {1, 2}
    side = make_side(request, name="x", eos_token_ids=(EOS,))
    assert side.end == 20 - SIZE
    assert side.frames[-1].num_tokens == side.frames[-1].num_committed == 20 - 11


@pytest.mark.parametrize(
    ("states", "ratios", "edited", "left"),
    [
        ([2, 1, 0], [0.0, 0.5, 1.0], [0, 0, 0], [True, False]),  # an EOS was stored, what lay behind it dropped
        ([1, 1, 0], [0.0, 0.0, 1.0], [0, 1, 0], [True, False]),  # the same under T2T: verified, and still changing
        ([1, 2, 0], [0.5, 0.0, 1.0], [0, 0, 0], [False, False]),  # cut off
    ],
)
def test_what_leaves_with_the_last_forward(
    states: list[int], ratios: list[float], edited: list[int], left: list[bool]
) -> None:
    trace, zero = TraceRecorder(), np.zeros((1, 3))
    trace.add(0, ["a"], [0], np.array([states]), np.array([ratios]), zero, np.array([edited]), None, None)
    (request,) = run_of(trace).requests
    assert [life.left for life in block_lives(request)] == left


def test_ranks_go_by_active_slots_not_by_slots() -> None:
    trace = TraceRecorder()
    states, ratios = np.array([[2, 1, 1]], dtype=np.int8), np.array([[0.0, 0.25, 0.75]])
    trace.add(0, ["a"], [0], states, ratios, np.ones((1, 3)), np.zeros((1, 3)), None, None)
    assert [r.tolist() for r in ratios_by_rank(run_of(trace))] == [[0.25], [0.75]]


def test_full_attention_requests_are_left_out_and_counted() -> None:
    trace = simulate(2)
    alone = measure(run_of(trace))
    canvas = TraceRecorder()
    for recorder in (trace, canvas):
        recorder.extend(
            [
                StepTrace(
                    request_id="c", step=0, slot=0, block=block, state="CANVAS", mask_ratio=1.0, accepted=1, edited=0
                )
                for block in (0, 1)
            ]
        )
    both = measure(run_of(trace))
    assert (both.num_other, both.num_requests, both.num_accepted) == (1, 1, alone.num_accepted)
    assert all(r.tokens_TNB is not None for r in run_of(trace).requests)
    with pytest.raises(ValueError, match="full-attention requests only"):
        run_of(canvas)


def test_the_block_size_is_never_guessed(tmp_path: Path) -> None:
    trace = simulate(2, detail=False)
    assert measure(run_of(trace)).token_efficiency is None
    assert measure(make_run(trace.table(), name="x", block_size=SIZE)).token_efficiency is not None
    trace.block_size = SIZE
    trace.write(tmp_path / "t.parquet")
    assert measure(make_run(read_trace_table(tmp_path / "t.parquet"), name="x")).block_size == SIZE
    with pytest.raises(ValueError, match="block size is 8, not the 16"):
        make_run(trace.table(), name="x", block_size=16)


@pytest.mark.parametrize("t2t", [None, T2T(tau=0.7)])
def test_frames_say_what_the_rows_say(t2t: T2T | None) -> None:
    trace = simulate(3, prompts=(11,), t2t=t2t)
    rows = trace.rows
    (request,) = run_of(trace).requests
    side = make_side(request, name="x")
    assert side.num_prompt == 3 and side.prompt_tokens == (10, 11, 12)
    for number, frame in enumerate(side.frames):
        here = [r for r in rows if r.step == number]
        assert [len(s.new) for s in frame.slots] == [r.accepted for r in here]
        assert [s.state for s in frame.slots] == [r.state for r in here]
        assert frame.store_only == all(r.state != "ACTIVE" for r in here)
        assert frame.num_tokens == sum(r.accepted for r in rows if r.step <= number)
        assert [len(s.edited) for s in frame.slots] == [r.edited for r in here]
    assert side.frames[-1].num_committed == 45
    assert side.frames[0].caption == "Decode B1"
    assert t2t is not None or side.frames[-1].caption.startswith("Store B6 only")


def test_replay_needs_tokens_and_escapes_their_text(tmp_path: Path) -> None:
    (request,) = run_of(simulate(2, detail=False)).requests
    with pytest.raises(ValueError, match="traced without tokens"):
        make_side(request, name="x")
    (request,) = run_of(simulate(2)).requests
    evil = "</script><script>alert('\"')</script><!--"
    texts = dict.fromkeys(range(40), evil)
    write_replay([make_side(request, name=evil)], tmp_path / "r.html", title=evil, note=evil, texts=texts)
    page = (tmp_path / "r.html").read_text()
    assert page.count("</script>") == 2 and page.count("<script") == 2 and "<!--" not in page
    data = page.split('type="application/json">')[1].split("</script>")[0]
    assert json.loads(data)["texts"]["7"] == evil


def test_report_of_two_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    simulate(1, prompts=PROMPTS).write(tmp_path / "one.parquet")
    simulate(4, prompts=PROMPTS).write(tmp_path / "two.parquet")
    out = tmp_path / "out"
    arguments = [f"SingleBD={tmp_path / 'one.parquet'}", str(tmp_path / "two.parquet"), "--out", str(out)]
    assert trace_report.main([*arguments, "--request", "r3"]) == 0
    report = json.loads((out / "report.json").read_text())
    assert [run["name"] for run in report["runs"]] == ["SingleBD", "two"]
    assert report["runs"][0]["tpf"] < report["runs"][1]["tpf"]
    for name in (*report["plots"], "report.md", "replay.html"):
        assert (out / name).stat().st_size > 1000
    assert "| store-only forwards |" in capsys.readouterr().out
    assert trace_report.main([*arguments, "--request", "r9"]) == 2
    assert "has no request 'r9'" in capsys.readouterr().err


def test_report_of_a_model(tiny_model_dir: Path, tmp_path: Path) -> None:
    arguments = ["--model", str(tiny_model_dir), "--prompt", "2 + 3?", "--max-tokens", "20", "--out", str(tmp_path)]
    assert trace_report.main(arguments) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    single, multi = report["runs"]
    assert single["num_slots"] == 1 and multi["num_slots"] == 4 and single["block_size"] == multi["block_size"] == 4
    for name, run in (("SingleBD", single), ("MultiBD", multi)):
        assert run["num_forwards"] == report["settings"][f"{name} forwards"]
    assert (tmp_path / "replay.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    "case", ["missing", "empty", "text", "columns", "type", "no rows", "folder", "slots", "state"]
)
def test_what_is_no_trace_is_told_in_a_sentence(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, table = tmp_path / "t.parquet", simulate(2).table()
    state = table.column_names.index("state")
    tables = {
        "columns": table.drop_columns(["accepted"]),
        "type": table.set_column(state, "state", pa.array([1] * len(table))),
        "no rows": table.slice(0, 0),
        "slots": table.slice(1),
        "state": table.set_column(state, "state", pa.array(["ASLEEP"] * len(table))),
    }
    if case in tables:
        pq.write_table(tables[case], path)
    elif case == "folder":
        path.mkdir()
    elif case != "missing":
        path.write_text("no trace" if case == "text" else "")
    assert trace_report.main([str(path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"trace_report: {path}: ") and len(error.splitlines()) == 1
    expected = {
        "missing": "there is no such",
        "empty": "not a Parquet file",
        "text": "not a Parquet file",
        "columns": "column 'accepted' is missing",
        "type": "column 'state' is int64",
        "no rows": "the trace is empty",
        "folder": "holds no trace parts",
        "slots": "request 'r0' lacks slots",
        "state": "state 'ASLEEP' is none of",
    }
    assert expected[case] in error
    assert not (tmp_path / "out").exists()
