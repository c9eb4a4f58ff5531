"""ledger-mini: every answer that it draws is what its question says, and it has the shape that makes blocks deep."""

import itertools
import re

from mbd_core.evaluation.graders import grade
from mbd_core.evaluation.problem_set import load_problems
from mbd_core.evaluation.tasks import find_task
from mbd_core.tasks import ledger_mini
from mbd_core.tasks.split import Split, split_of
from mbd_core.tasks.tiny_tokenizer import train_tokenizer

ENTRY = re.compile(r"([A-Za-z])([=+*-])(\d)")
BLOCK = 16


def drawn(count: int, *, seed: int = 0, split: Split = "test") -> list[dict[str, str]]:
    return list(itertools.islice(ledger_mini.generate(split=split, seed=seed), count))


def balances(question: str) -> dict[str, int]:
    """The balance of each entry, worked out again from the words of the question alone."""
    found: dict[str, int] = {}
    last = 0
    for entry in question.split():
        match = ENTRY.fullmatch(entry)
        assert match is not None, entry
        label, sign, number = match[1], match[2], int(match[3])
        last = {"=": number, "+": last + number, "-": last - number, "*": last * number}[sign] % 100
        found[label] = last
    return found


def test_every_answer_is_what_the_question_says() -> None:
    for row in drawn(200):
        worked, _, result = row["answer"].partition("\n#### ")
        expected = balances(row["question"])
        assert worked == " ".join(f"{label}{value:02d}" for label, value in expected.items())
        assert int(result) == list(expected.values())[-1]


def test_the_grader_takes_its_answer_and_no_other_problem_s() -> None:
    problems = load_problems(find_task("ledger-mini"), seed=1, limit=6)
    for problem, row in zip(problems.problems, drawn(6, seed=1), strict=True):
        assert grade(problems.task, problem, row["answer"]).correct
        assert not grade(problems.task, problem, row["answer"] + "1").correct


def test_chains_are_longer_than_a_block_has_balances_and_several_begin() -> None:
    for row in drawn(200):
        begins = [place for place, entry in enumerate(row["question"].split()) if "=" in entry]
        lengths = [after - at for at, after in itertools.pairwise(begins)]
        assert begins[0] == 0 and len(begins) >= 4
        assert all(6 <= length <= 10 for length in lengths)


def test_splits_share_no_chain_and_a_seed_repeats_its_stream() -> None:
    assert drawn(20) == drawn(20) != drawn(20, seed=1)
    chains = {split: {row["question"] for row in drawn(300, split=split)} for split in ("train", "valid", "test")}
    assert not chains["train"] & chains["test"] and not chains["valid"] & chains["test"]
    assert all(split_of(f"ledger {question}") == split for split, found in chains.items() for question in found)


def test_a_balance_is_three_tokens_and_an_answer_nine_blocks_of_16() -> None:
    rows = drawn(400)
    tokenizer = train_tokenizer((f"{row['question']}\n{row['answer']}" for row in rows), vocab_size=400)
    for row in rows[:20]:
        worked = row["answer"].partition("\n")[0]
        assert len(tokenizer.encode(worked)) == 3 * len(worked.split())
        assert 8 * BLOCK < len(tokenizer.encode(row["answer"])) + 1 <= 9 * BLOCK
