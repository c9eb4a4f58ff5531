"""What a rollout costs a learner: the rows of the table; only the engine's own states have its log-probabilities."""

from pathlib import Path

import pytest

from benchmarks.replay import COLUMNS, PHASES, drawn_answers, replay_rows, update_seconds
from benchmarks.replay import replay as bench_replay


def test_rows_say_what_an_answer_costs_and_how_far_it_is_from_the_engine() -> None:
    model, answers, seconds = drawn_answers("tiny-mbd", "gsm-mini", 3, slots=4, seed=1)
    phases = update_seconds(model, answers, rollouts=seconds, repeats=1)
    assert set(PHASES) == {"slots", "answers", "rollouts", *phases} and phases["ratio"] == phases["bfloat16"] / seconds
    rows = {row["states"]: row for row in replay_rows(model, answers, slots=4, shrinks=(1, 2), repeats=1)}
    assert list(rows) == ["exact", "exact, shrink 2", "block-local", "all-masked"]
    exact, shrunk = rows["exact"], rows["exact, shrink 2"]
    assert exact["d_max"] < 2e-4 and exact["d_share"] == 0
    assert all(row["d_max"] > 0.01 for name, row in rows.items() if name not in ("exact", "block-local"))
    assert shrunk["noisy"] < exact["noisy"] and exact["tokens"] == exact["noisy"] + exact["clean"]
    assert exact["share"] == pytest.approx(exact["tokens"] / exact["trace_rl"])
    assert all(set(COLUMNS) <= set(row) for row in rows.values())


def test_a_task_without_problems_and_an_existing_file_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_replay(["--model", "tiny-mbd", "--task", "gsm8k"]) == 2
    assert "--task gsm8k needs a file of problems" in capsys.readouterr().err
    (tmp_path / "a.json").write_text("a user's")
    assert bench_replay(["--model", "tiny-mbd", "--json", str(tmp_path / "a.json")]) == 2
    assert (tmp_path / "a.json").read_text() == "a user's"
