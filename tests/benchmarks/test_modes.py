"""The benchmark of modes: what it counts, and that a budget is one of the fixed modes."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import modes as benchmark
from benchmarks.commands import modes as main
from benchmarks.modes import (
    BusyEngine,
    Mode,
    engine_of,
    load_causal,
    measure_modes,
    random_requests,
    run_round,
    trained_here,
)
from mbd_core.engine.engine import Engine
from mbd_core.engine.schedule.drafting import LEAST_VERIFIED

CPU = torch.device("cpu")
FIXTURE = str(Path(__file__).parents[1] / "parity/fixtures/nemotron-0")


def test_a_budget_that_is_exceeded_is_single_tokens() -> None:
    """Tokens and positions of three requests at once."""
    model = load_causal(FIXTURE, device=CPU)
    cases = [Mode(method="ar"), *(Mode(method="linear-spec", budget=n) for n in (None, 2))]
    rows = measure_modes(model, cases, rows=3, answers=4, max_tokens=16, repeats=1)
    counted = [(row["tpf"], row["positions_per_token"]) for row in rows]
    assert counted[0] == counted[2]
    assert counted[0][0] == 1.0 and counted[1][1] > 2 * counted[0][1]
    assert max(row["over_best_fixed"] for row in rows if row["budget"] is None) == 1.0


def test_an_engine_that_may_choose_begins_with_drafts() -> None:
    """Seven answers of four tokens, two of them under way, verify fewer drafts than a choice takes."""
    assert LEAST_VERIFIED > 7 * 4
    cases = [Mode(method="ar"), *(Mode(method="linear-spec", budget=n, fresh=n is not None) for n in (None, 3))]
    rows = measure_modes(load_causal(FIXTURE, device=CPU), cases, rows=3, answers=2, max_tokens=4, repeats=1)
    single, drafts, chosen = (row["positions_per_token"] for row in rows)
    assert chosen == drafts > single


def test_the_command_writes_a_row_for_each_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "modes.json"
    size = ["--concurrency", "1,2", "--budget", "1", "--max-tokens", "4", "--repeats", "1"]
    assert main([*size, "--model", FIXTURE, "--json", str(out)]) == 0
    assert capsys.readouterr().out.count("| linear-spec, budget 1 |") == 2
    rows = json.loads(out.read_text())["rows"]
    assert [row["mode"] for row in rows[3:5]] == ["linear-spec, budget 1, fresh", "linear-spec, budget 1"]
    assert len(rows) == 10
    assert main([*size, "--model", "tiny-sdar"]) == 2


def test_a_fresh_mode_has_a_new_engine_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one has served a round before it is measured."""
    begun, create = list[tuple[bool, int]](), BusyEngine.__init__

    def watched(self: BusyEngine, engine: Engine, *args: Any, **kwargs: Any) -> None:
        begun.append((engine.config.block_budget is None, engine.counts.committed_tokens))
        create(self, engine, *args, **kwargs)

    monkeypatch.setattr(BusyEngine, "__init__", watched)
    model = load_causal(FIXTURE, device=CPU)
    cases = [Mode(method="ar"), *(Mode(method="linear-spec", budget=1, fresh=fresh) for fresh in (True, False))]
    measure_modes(model, cases, rows=1, answers=2, max_tokens=8, repeats=2)
    assert [before > 0 for fixed, before in begun if fixed] == [False, True]
    assert sorted(before > 0 for fixed, before in begun if not fixed) == [False] * 3 + [True] * 2


def test_modes_take_turns_until_each_has_given_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three requests at once the first are cut, so that no two begin together; a slice here is one step."""
    monkeypatch.setattr(benchmark, "SLICE", 1.0)
    model, mode = load_causal(FIXTURE, device=CPU), Mode(method="ar")
    requests = random_requests(model, mode, max_tokens=6, number=3)
    busy = {
        name: BusyEngine(engine_of(model, requests, mode, rows=3), requests, clock=itertools.count().__next__)
        for name in (mode, Mode(method="ar", budget=9))
    }
    runs = run_round(busy, answers=6)
    assert [run.answers for run in runs.values()] == [6, 6]
    for run in runs.values():  # one request ends every two steps
        assert run.tokens == run.forwards and run.steps == 12 and run.seconds == run.steps
    assert not any(engine.engine.has_work for engine in busy.values())


def test_the_trained_model_learns() -> None:
    """Two updates change every matrix; what many do is the benchmark's own business."""
    before, after = (trained_here(num_updates=n, device=CPU).state_dict() for n in (0, 2))
    assert all(not torch.equal(before[name], after[name]) for name in before if before[name].ndim == 2)
