"""Timed runs: each configuration by itself, requests one at a time and then always as many as was asked for."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sweep_rows import planned_samples

from mbd_core.batch import timing
from mbd_core.batch.decoding_model import DecodingModel, ModelRefused
from mbd_core.batch.rows import TIMED_COLUMNS
from mbd_core.batch.timed_cases import TimedCase, Timing, timed_cases
from mbd_core.batch.timing import ALONE, TOGETHER, TimedStage
from mbd_core.decoding.blocks.request import Request, StepOutput
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.serving.tokens.load import load_engine

PROMPTS = [f"Tom has {number} pens." for number in range(6)]


def cases(
    timing: Timing, *, buffer_sizes: Sequence[int] = (1, 2), prompts: Sequence[str] = PROMPTS
) -> list[TimedCase]:
    table = planned_samples(["m"], prompts=prompts, buffer_sizes=buffer_sizes)
    return timed_cases(table.to_pylist(), timing)


class Loader:
    """Loads real engines, and watches what they are given and when."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.sizes = folder, list[int]()
        self.under_way: list[tuple[str, ...]] = []
        self.buffers: list[set[int]] = []
        self._now: dict[str, Request] = {}
        add, step = Engine.add, Engine.step

        def watched_add(engine: Engine, request: Request) -> None:
            add(engine, request)
            self._now[request.request_id] = request

        def watched_step(engine: Engine) -> list[StepOutput]:
            self.under_way.append(tuple(self._now))
            self.buffers.append({request.decoding.buffer_size for request in self._now.values()})
            outputs = step(engine)
            for output in outputs:
                if output.output is not None:
                    del self._now[output.request_id]
            return outputs

        monkeypatch.setattr(Engine, "add", watched_add)
        monkeypatch.setattr(Engine, "step", watched_step)

    def __call__(self, name: str, buffer_size: int) -> DecodingModel:
        self.sizes.append(buffer_size)
        config = EngineConfig(max_rows=3, num_pages=64, buffer_size=buffer_size, prefix_caching=False)
        loaded = load_engine(self.folder, config)
        return DecodingModel(loaded.engine, loaded.tokenizer)


def timed(stage: TimedStage, of: Sequence[TimedCase]) -> list[dict[str, Any]]:
    return [row for case in of for row in stage(case).to_pylist()]


def test_every_configuration_is_timed_by_itself_on_the_same_problems(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, of = Loader(tiny_model_dir, monkeypatch), cases(Timing(problems=2, concurrency=3))
    rows = timed(TimedStage(loader, concurrency=3), of)
    assert all(len(sizes) == 1 for sizes in loader.buffers), "no batch mixes configurations"
    assert loader.sizes == [1, 2], "each has an engine of its own buffer size"
    assert max(map(len, loader.under_way)) == 3
    runs = Counter((row["config"], row["run"], row["concurrency"]) for row in rows)
    assert sorted(runs.values()) == [2, 2, 6, 6]
    assert {(run, together) for _, run, together in runs} == {(ALONE, 1), (TOGETHER, 3)}
    problems = {
        config: [(row["run"], row["problem_id"]) for row in rows if row["config"] == config and row["run"] == ALONE]
        for config, _, _ in runs
    }
    assert len({str(asked) for asked in problems.values()}) == 1
    assert all(row["ended"] > row["begun"] and row["num_tokens"] > 0 and row["error"] is None for row in rows)


def test_requests_alone_do_not_overlap_and_together_always_as_many_run_as_were_asked_for(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (case,) = cases(Timing(problems=3, concurrency=2), buffer_sizes=[2])
    rows = timed(TimedStage(Loader(tiny_model_dir, monkeypatch), concurrency=2), [case])
    alone, together = ([row for row in rows if row["run"] == run] for run in (ALONE, TOGETHER))
    ends = [(row["begun"], row["ended"]) for row in alone]
    assert all(first[1] <= second[0] for first, second in pairwise(ends))
    assert len(together) == 4
    for row in sorted(together, key=lambda row: row["begun"])[:-1]:
        # At a moment when one is given back, at most one other is under way; the next is given right then.
        under_way = sum(other["begun"] < row["ended"] < other["ended"] for other in together)
        assert under_way <= 1
    assert max(alone[-1]["ended"], alone[0]["begun"]) < min(row["begun"] for row in together)


def test_warm_up_is_not_timed_and_the_clock_is_read_when_a_request_begins_and_ends(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (case,) = cases(Timing(problems=1, concurrency=1), buffer_sizes=[1])
    loader, ticks = Loader(tiny_model_dir, monkeypatch), iter(range(100))
    rows = timed(TimedStage(loader, concurrency=1, clock=lambda: float(next(ticks))), [case])
    assert [(row["begun"], row["ended"]) for row in rows] == [(0, 1), (2, 3), (4, 5)]
    assert len(loader.under_way) > sum(row["num_forwards"] for row in rows), "warm-up takes forwards too"


def test_what_the_model_cannot_serve_is_left_out_and_a_failure_keeps_its_reason(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = TimedStage(Loader(tiny_model_dir, monkeypatch), concurrency=2)
    timing = Timing(problems=2, concurrency=2)
    (mixed,) = cases(timing, buffer_sizes=[1], prompts=["word " * 600, "How many?"])
    assert [row["problem_id"] for row in timed(stage, [mixed])] == ["p1", "p1"]
    (none,) = cases(timing, buffer_sizes=[1], prompts=["word " * 600])
    assert timed(stage, [none]) == []

    def fail(_: Engine) -> list[StepOutput]:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", fail)
        (row,) = timed(stage, [mixed])
    assert (row["error"], row["run"]) == ("RuntimeError: broken", None)
    assert len(timed(stage, [mixed])) == 2, "with a new engine"

    def refuse(_name: str, _size: int) -> DecodingModel:
        raise ValueError("no KV page")

    with pytest.raises(ModelRefused, match="model 'm': no KV page"):
        TimedStage(refuse, concurrency=1)(mixed)


def test_a_stop_string_ends_a_timed_request_as_it_ends_a_sample(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (case,) = cases(Timing(problems=2, concurrency=2), buffer_sizes=[2])
    whole = timed(TimedStage(Loader(tiny_model_dir, monkeypatch), concurrency=2), [case])
    assert max(row["num_tokens"] for row in whole) > 3
    monkeypatch.setattr(timing, "decode_text", lambda _tokenizer, tokens: "x" * len(tokens))
    stopped = replace(case, rows=[{**row, "stop": '["xxx"]'} for row in case.rows])
    rows = timed(TimedStage(Loader(tiny_model_dir, monkeypatch), concurrency=2), [stopped])
    assert len(rows) == 6 and {row["num_tokens"] for row in rows} == {3}


def test_the_timed_problems_are_spread_over_the_task(tiny_model_dir: Path) -> None:
    prompts = [str(number) for number in range(100)]
    (case,) = cases(Timing(problems=4, concurrency=3), buffer_sizes=[1], prompts=prompts)
    assert [row["prompt"] for row in case.rows[: case.num_alone]] == ["0", "25", "50", "75"]
    further = [int(row["prompt"]) for row in case.rows[case.num_alone :]]
    assert len(further) == 2 and further[0] < 25 < 50 < further[1], "spread over the rest"
    (more,) = cases(Timing(problems=10, concurrency=8), buffer_sizes=[1], prompts=prompts)
    gaps = [b - a for a, b in pairwise(sorted(int(row["prompt"]) for row in more.rows[more.num_alone :]))]
    assert len(gaps) == 5 and max(gaps) < 25
    assert cases(Timing(problems=0)) == []
    assert [case.number for case in cases(Timing())] == [0, 1]
    assert TIMED_COLUMNS.names[:3] == ["model", "method", "task"]
    assert replace(Timing(), problems=40).together == 40


def test_samples_that_killed_an_engine_are_left_out(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Loader(tiny_model_dir, monkeypatch)
    (case,) = cases(Timing(problems=3, concurrency=3), buffer_sizes=[1])
    dead = case.rows[0]
    rows = TimedStage(loader, concurrency=3)(case, left_out={dead["sample"]}).to_pylist()
    assert {row["problem_id"] for row in rows} == {row["problem_id"] for row in case.rows} - {dead["problem_id"]}
    assert Counter(row["run"] for row in rows) == {ALONE: 2, TOGETHER: 5}
    assert all(dead["sample"] not in map(int, batch) for batch in loader.under_way)
    assert not TimedStage(loader, concurrency=3)(case, left_out={row["sample"] for row in case.rows}).num_rows
