"""ledger-mini: every answer that it draws is what its question says, and it has the shape that makes blocks deep."""

import itertools
import re

from mbd_core.checkpoint.chat import chat_prompt, question
from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.evaluation.tasks.problems import load_problems
from mbd_core.tasks import ledger_mini
from mbd_core.tasks.split import Split, split_of
from mbd_core.tasks.tiny_tokenizer import train_tokenizer

ENTRY = re.compile(r"([A-Za-z])([=~+-])(\d)")
BLOCK = 16


def drawn(count: int, *, seed: int = 0, split: Split = "test") -> list[dict[str, str]]:
    return list(itertools.islice(ledger_mini.generate(split=split, seed=seed), count))


def worked(question: str) -> list[str]:
    """The pages, worked out again from the words of the question alone: a carried digit and five balances each."""
    pages: list[str] = []
    carried, last, newest = 0, 0, 0
    for place, entry in enumerate(question.split()):
        match = ENTRY.fullmatch(entry)
        assert match is not None, entry
        if place % 5 == 0:
            carried = newest
            pages.append(str(carried))
        label, sign, number = match[1], match[2], int(match[3])
        last = {"=": 11 * number, "~": 10 * carried + number, "+": last + number, "-": last - number}[sign] % 100
        newest = last // 10 if last >= 50 else newest
        pages[-1] += f" {label}{last:02d}"
    return pages


def test_every_answer_is_what_the_question_says() -> None:
    for row in drawn(200):
        pages, _, result = row["answer"].partition("\n#### ")
        expected = worked(row["question"])
        assert len(expected) == 9 and pages == " ".join(expected)
        assert result == "".join(page[0] for page in expected[-4:])


def test_what_is_carried_often_differs_from_what_was_carried_before() -> None:
    """So a page that is decoded before the one before it is whole must not take an older balance for the newest."""
    digits = [[page[0] for page in worked(row["question"])] for row in drawn(200)]
    kept = [one == other for found in digits for one, other in itertools.pairwise(found[1:])]
    assert sum(kept) / len(kept) < 0.6
    assert {digit for found in digits for digit in found} == set("056789")


def test_the_grader_takes_its_answer_and_no_other_problem_s() -> None:
    problems = load_problems(find_task("ledger-mini"), seed=1, limit=6)
    for problem, row in zip(problems.problems, drawn(6, seed=1), strict=True):
        assert problems.task.grade(problem, row["answer"]).correct
        assert not problems.task.grade(problem, row["answer"] + "1").correct


def test_chains_are_longer_than_a_page_and_several_begin_by_themselves() -> None:
    free = 0
    for row in drawn(200):
        begins = [place for place, entry in enumerate(row["question"].split()) if entry[1] in "=~"]
        lengths = [after - at for at, after in itertools.pairwise(begins)]
        assert begins[0] == 0 and len(begins) >= 4
        assert all(6 <= length <= 10 for length in lengths)
        free += sum(row["question"].split()[place][1] == "=" for place in begins) / len(begins)
    assert 0.4 < free / 200 < 0.6


def test_splits_share_no_chain_and_a_seed_repeats_its_stream() -> None:
    assert drawn(20) == drawn(20) != drawn(20, seed=1)
    chains = {split: {row["question"] for row in drawn(300, split=split)} for split in ("train", "valid", "test")}
    assert not chains["train"] & chains["test"] and not chains["valid"] & chains["test"]
    assert all(split_of(f"ledger {question}") == split for split, found in chains.items() for question in found)


def test_a_page_is_a_block_of_16_and_an_answer_nine() -> None:
    rows = drawn(400)
    tokenizer = train_tokenizer((f"{row['question']}\n{row['answer']}" for row in rows), vocab_size=400)
    for row in rows[:20]:
        assert len(chat_prompt(tokenizer, question(row["question"]))) == 8 * BLOCK
        assert [len(tokenizer.encode(page)) for page in worked(row["question"])[:-1]] == [BLOCK] * 8
        assert 8 * BLOCK < len(tokenizer.encode(row["answer"])) + 1 <= 9 * BLOCK
