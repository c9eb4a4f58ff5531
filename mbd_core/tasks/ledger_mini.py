"""ledger-mini: running balances of a ledger, in GSM8K's columns (`question`, `answer` ending in `#### N`).

    a=7 b+4 c-8 d=2 e+9 f*6 ...    a balance begins (`=7`), or goes on from the one before it (`+4`), modulo 100
    a07 b11 c03 d02 e11 f66 ...
    #### 66

A balance is three tokens of a tokenizer that was trained on such rows, so five of them and a third fill a block of 16,
and each needs the one before it: a block has depth. A chain that begins needs nothing of the chains before it, so
later blocks have work of their own. Sums are a rule; products are rare, so that a model learns them later.
The *key*, the chain of all entries, decides the split.
"""

import random
import string
from collections.abc import Iterator

from mbd_core.tasks.split import Split, distinct

LABELS = string.ascii_lowercase + string.ascii_uppercase[:18]
"""The entries of a problem: as many for each, so that an answer is nine blocks of 16."""
MODULUS = 100
PRODUCTS = 0.06
"""Of the entries that go on from a balance, those that multiply it."""
CHAIN_LENGTHS = (6, 10)
"""The fewest and the most entries of a chain."""


def _problem(rng: random.Random) -> tuple[str, dict[str, str]]:
    entries: list[str] = []
    balances: list[int] = []
    rest = 0
    while len(balances) < len(LABELS):
        number = rng.randrange(10)
        if rest == 0:
            rest = rng.randint(*CHAIN_LENGTHS)
            sign, balance = "=", number
        elif rng.random() < PRODUCTS:
            number = rng.randint(2, 9)
            sign, balance = "*", (balances[-1] * number) % MODULUS
        elif rng.random() < 0.5:
            sign, balance = "+", (balances[-1] + number) % MODULUS
        else:
            sign, balance = "-", (balances[-1] - number) % MODULUS
        entries.append(f"{sign}{number}")
        balances.append(balance)
        rest -= 1
    question = " ".join(label + entry for label, entry in zip(LABELS, entries, strict=True))
    worked = " ".join(f"{label}{balance:02d}" for label, balance in zip(LABELS, balances, strict=True))
    return f"ledger {question}", {"question": question, "answer": f"{worked}\n#### {balances[-1]}"}


def generate(*, split: Split, seed: int) -> Iterator[dict[str, str]]:
    """A stream of `{"question", "answer"}` rows of one split, without repeats; a seed always gives the same stream."""
    rng = random.Random(f"ledger-mini/{split}/{seed}")
    for _, _, row in distinct(lambda: _problem(rng), split):
        yield row
