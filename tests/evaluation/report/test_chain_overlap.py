"""Chains of equations that occur in training: found in answers, and counted apart in a sweep's samples."""

import itertools
import json
from pathlib import Path

from written_sweeps import write_rows

from mbd_core.evaluation.report.studies.chain_overlap import chain, overlap_table, training_chains
from mbd_core.tables import markdown
from mbd_core.tasks import gsm_mini


def test_a_chain_is_the_equations_in_order() -> None:
    answer = "Tom buys 3, so there are 4 + 3 = 7 pens.\nThe bags hold 2 * 5 = 10, so there are 7 + 10 = 17.\n#### 17"
    assert chain(answer) == ("4 + 3 = 7", "2 * 5 = 10", "7 + 10 = 17")


def test_the_training_chains_are_those_of_the_drawn_problems() -> None:
    rows = list(itertools.islice(gsm_mini.generate(split="train", seed=4), 20))
    assert training_chains([(4, 20)]) == {chain(row["answer"]) for row in rows}


def test_the_accuracy_is_split_by_whether_the_chain_was_trained(tmp_path: Path) -> None:
    problems = list(itertools.islice(gsm_mini.generate(split="test", seed=0), 3))
    samples = [
        {
            "model": "m",
            "method": "MBD",
            "task": "gsm-mini",
            "prompt": row["question"],
            "config": json.dumps({"tau_m2t": 0.9}),
            "correct": number != 1,
        }
        for number, row in enumerate(problems)
    ]
    write_rows(tmp_path, samples)
    (tmp_path / "report.json").write_text(json.dumps({"settings": {"seed": 0, "tasks": {"gsm-mini": {"n": 3}}}}))
    table = markdown([overlap_table([tmp_path] * 2, {chain(problems[0]["answer"])})]).splitlines()
    assert table[2:] == ["| m | MBD | 0.9 | unseen | 2 | 50.00 |", "| m | MBD | 0.9 | in training | 1 | 100.00 |"]
