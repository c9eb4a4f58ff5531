"""Traces, frames and counts of verified decoding: what was drafted, confirmed and refused, and by whom."""

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from small_engines import B, build, engine, request

from mbd_core.decoding.answers.slots import Frame
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.decoding.blocks.verify_config import Verify
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.models.decoder import init_weights
from mbd_core.trace.frame_replay import frame_side
from mbd_core.trace.measures import measure
from mbd_core.trace.recorder import SINCE_ADDED, TraceRecorder, read_trace
from mbd_core.trace.replay import replay_side, used_tokens
from mbd_core.trace.traced_run import read_run


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("verify", [Verify(), Verify(exact=True, store="causal")], ids=["kept", "exact"])
def test_a_trace_says_what_each_forward_made_of_a_draft(verify: Verify, slots: int, tmp_path: Path) -> None:
    """The rows add up to the request's counts, and page and frames show the same verdicts."""
    model = build()
    init_weights(model, seed=11, std=0.14)
    trace = TraceRecorder(detail=True)
    served = Engine(model, EngineConfig(max_rows=2, buffer_size=2), trace=trace)
    decoding = DecodingConfig(block_size=B, buffer_size=slots, verify=verify)
    r = request("a", 3, "single", prompt=(5, 9, 14, 33, 7), max_tokens=18, decoding=decoding, sampling=Sampling())
    r = replace(r, frames=True, ignore_eos=True)
    served.add(r)
    served.add(replace(r, request_id="b", frames=False, decoding=DecodingConfig(block_size=B)))
    frames: list[Frame] = []
    outputs = {}
    while served.has_work:
        for step in served.step():
            frames += [step.frame] if step.frame is not None else []
            outputs |= {step.request_id: step.output} if step.output is not None else {}
    counts = outputs["a"].counts
    trace.write(tmp_path / "t.parquet")
    rows = [row for row in read_trace(tmp_path / "t.parquet") if row.request_id == "a"]
    assert sum(row.judged for row in rows) == counts.num_drafted_tokens > counts.num_confirmed_tokens > 0
    assert sum(row.confirmed for row in rows) == counts.num_confirmed_tokens
    assert sum(row.accepted for row in rows) == counts.num_tokens == 18
    assert len(rows) == 2 * counts.num_forwards and len(frames) == counts.num_forwards
    assert served.counts.verifications == len({row.step for row in rows if row.judged})
    assert sum(served.counts.accepted_lengths.take()) == counts.num_confirmed_tokens

    run = read_run(tmp_path / "t.parquet", name="verified")
    assert measure(run).num_judged == counts.num_drafted_tokens
    assert run.request("a").store_only_T.sum() == counts.num_store_forwards
    side = replay_side(run.request("a"), name="verified")
    assert replay_side(run.request("b"), name="single").frames[0].slots[0].verdict is None
    answer = outputs["a"].tokens
    drafted: dict[int, int] = {}
    for shown, frame in zip(side.frames, frames, strict=True):
        for slot, own in zip(shown.slots, frame.slots, strict=False):
            assert slot.verdict == own.verdict and slot.new == own.accepted and slot.verdict is not None
            start = (slot.block - 1) * B
            for offset in slot.verdict.confirmed:  # the verification kept what the block had drafted
                assert slot.tokens[offset] == drafted[start + offset]
            for offset in slot.verdict.refused:
                assert offset in slot.new
            drafted |= {start + i: t for i, t in enumerate(slot.verdict.drafted) if t is not None}
        has_judged = any(s.verdict is not None and s.verdict.judged for s in shown.slots)
        assert ("erify" in shown.caption) == has_judged
        assert ("raft B" in shown.caption) == any(s.verdict and any(s.verdict.drafted) for s in shown.slots)
    assert side.frames[-1].num_tokens == 18
    assert set(answer) <= used_tokens([side])
    live = frame_side(frames, name="live", block_size=B, prompt=r.prompt, num_tokens=18, ended=False)
    for shown, recorded in zip(live.frames, side.frames, strict=True):
        assert (shown.caption, shown.store_only) == (recorded.caption, recorded.store_only)


def test_a_trace_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    trace = TraceRecorder(detail=True)
    served = Engine(build(), EngineConfig(max_rows=1, buffer_size=1), trace=trace)
    served.generate([request("a", 3, "single")])
    trace.write(tmp_path / "t.parquet")
    pq.write_table(pq.read_table(tmp_path / "t.parquet").drop_columns(list(SINCE_ADDED)), tmp_path / "old.parquet")
    assert read_trace(tmp_path / "old.parquet") == read_trace(tmp_path / "t.parquet")
    assert measure(read_run(tmp_path / "old.parquet", name="x")).num_judged == 0


def test_a_step_map_says_why_it_cannot_be_given() -> None:
    with pytest.raises(ValueError, match="does not say which of its forwards drafted"):
        engine(build()).add(request("a", 4, "verify", rollout=True, sampling=Sampling()))
