"""The study of the teacher at one slot: its arms see equally many answers to the same new problems."""

import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pytest

from mbd_core.engine.config import EngineConfig
from mbd_core.multitf.data.prepared import TinyData, conversations
from mbd_core.rl.config import HeldOutConfig
from mbd_core.rl.rollouts import RolloutPlan
from research.ledger.plan import BASE, REPORT, ROWS, seeded
from research.ledger.rows import COLUMNS, write_rows
from research.rl.teacher import NAMES, REWARD, SOLUTIONS, TEACHER, TEACHER_ARMS, report

ANSWERS = 1280
PUBLISHED = Path(__file__).resolve().parents[3] / "research" / "published" / "teacher"


def test_arms_see_equally_many_answers_to_the_same_new_problems() -> None:
    assert TEACHER.answers * TEACHER.iterations == REWARD.answers * REWARD.iterations == ANSWERS
    assert SOLUTIONS.train.batch_size * SOLUTIONS.train.steps == ANSWERS
    plan = RolloutPlan.of(replace(TEACHER, seed=1, held_out=HeldOutConfig(evaluate_every=0)), EngineConfig())
    asked = [row["prompt"] for _, part in plan.parts(0) for row in part.to_pylist()]
    supervised = seeded(SOLUTIONS, 1, base="ledger-mbd", block_size=16, steps=None, noise=None)
    assert isinstance(supervised.data, TinyData) and supervised.data.per_task == ANSWERS
    assert asked == [question for question, _ in islice(conversations(supervised.data), len(asked))]
    assert set(NAMES) == {BASE, *TEACHER_ARMS}


def test_the_published_report_is_that_of_its_rows(tmp_path: Path) -> None:
    shutil.copy(PUBLISHED / ROWS, tmp_path)
    assert report(tmp_path) == (PUBLISHED / REPORT).read_text()


def test_a_report_is_of_the_seeds_that_all_models_have(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    for recipe, seeds in ((BASE, (1, 2)), (TEACHER.name, (1,))):
        for seed in seeds:
            rows = [
                {
                    "recipe": recipe,
                    "seed": seed,
                    "problem": f"p{problem}",
                    "buffer_size": 4,
                    "tau_m2t": tau,
                    "correct": recipe != BASE or problem % 2 == 0,
                    "num_tokens": 40,
                    "num_forwards": 8,
                }
                for problem in range(4)
                for tau in (0.8, 0.85, 0.9, 0.95)
            ]
            write_rows(tmp_path / "rows" / f"{recipe}-s{seed}.parquet", [pa.Table.from_pylist(rows, schema=COLUMNS)])
    text = report(tmp_path)
    assert "4 unseen problems of ledger-mini of seed 1." in text and "+50" in text
    assert text == (tmp_path / "study.md").read_text() and (tmp_path / "study.png").exists()
    for piece in (tmp_path / "rows").glob(f"{TEACHER.name}*"):
        piece.unlink()
    other = pa.Table.from_pylist([{**rows[0], "seed": 9}], schema=COLUMNS)
    write_rows(tmp_path / "rows" / "other.parquet", [other])
    with pytest.raises(ValueError, match="has no seed that"):
        report(tmp_path)
