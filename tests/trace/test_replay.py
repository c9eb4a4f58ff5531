"""Frames of the replay page say what the rows of the trace say."""

import json
from pathlib import Path

import pytest
from simulated_trace import simulate

from mbd_core.decoding.blocks.config import T2T
from mbd_core.trace.recorder import TraceRecorder
from mbd_core.trace.replay import replay_side, write_replay
from mbd_core.trace.traced_run import TracedRun, traced_run

PROMPTS = (11, 8, 20, 3, 17)


def run_of(trace: TraceRecorder, name: str = "run") -> TracedRun:
    return traced_run(trace.table(), name=name)


@pytest.mark.parametrize("t2t", [None, T2T(tau=0.7)])
def test_frames_say_what_the_rows_say(t2t: T2T | None) -> None:
    trace = simulate(3, prompts=(11,), t2t=t2t)
    rows = trace.rows
    (request,) = run_of(trace).requests
    side = replay_side(request, name="x")
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
    with pytest.raises(ValueError):
        replay_side(request, name="x")
    (request,) = run_of(simulate(2)).requests
    evil = "</script><script>alert('\"')</script><!--"
    texts = dict.fromkeys(range(40), evil)
    write_replay([replay_side(request, name=evil)], tmp_path / "r.html", title=evil, note=evil, texts=texts)
    page = (tmp_path / "r.html").read_text()
    assert page.count("</script>") == 2 and page.count("<script") == 2 and "<!--" not in page
    data = page.split('type="application/json">')[1].split("</script>")[0]
    assert json.loads(data)["texts"]["7"] == evil
