"""ledger-mini: balances of a ledger, page by page, in GSM8K's columns (`question`, `answer` ending in `#### N`).

    a=6 b-0 c+7 d-8 e+3 f-2 g~4 ...    a balance begins (`=6`: 66) or continues (`-0`), modulo 100
    0 a66 b66 c73 d65 e68 6 f66 g64 ...
    #### 5886

A page is a digit carried onto the page, and five balances. That is a block of 16 tokens under a tokenizer trained on
such rows, and the question is whole blocks. Two things depend on earlier tokens:

- a balance needs the balance before it, so a block has depth. A chain that begins with `=` needs no earlier page, so
  later blocks have independent work. A chain that begins with `~4` takes its page's digit as its tens digit.
- the carried digit is the tens digit of the newest balance of at least 50 on the pages before; without such a balance
  it is 0. A page that is decoded too early finds an older balance, because the newer balance is not decoded yet.

The answer is the digits carried onto the last four pages. The *key*, the chain of all entries, decides the split.
"""

import random
import string
from collections.abc import Iterator

from mbd_core.tasks.split import Split, distinct

LABELS = string.ascii_lowercase + string.ascii_uppercase[:16]
"""The labels of a problem's entries. Every problem has all of them, so that its question has eight blocks of 16 tokens
and its answer nine."""
PAGE = 5
"""The balances of a page."""
CARRIED = 50
"""From this balance on, its tens digit is carried."""
GRADED = 4
"""The pages whose carried digits are the answer."""
MODULUS = 100
CHAIN_LENGTHS = (6, 10)
"""The fewest and the most entries of a chain."""


def _problem(rng: random.Random) -> tuple[str, dict[str, str]]:
    entries: list[str] = []
    balances: list[int] = []
    lines: list[str] = []
    digits = ""
    num_left = 0
    for at, label in enumerate(LABELS):
        if at % PAGE == 0:
            digits += str(next((balance // 10 for balance in reversed(balances) if balance >= CARRIED), 0))
            lines.append(digits[-1])
        number = rng.randrange(10)
        if num_left == 0:
            num_left = rng.randint(*CHAIN_LENGTHS)
            sign, tens = ("=", number) if rng.random() < 0.5 else ("~", int(digits[-1]))
            balance = 10 * tens + number
        elif rng.random() < 0.5:
            sign, balance = "+", (balances[-1] + number) % MODULUS
        else:
            sign, balance = "-", (balances[-1] - number) % MODULUS
        entries.append(f"{label}{sign}{number}")
        balances.append(balance)
        lines.append(f"{label}{balance:02d}")
        num_left -= 1
    question = " ".join(entries)
    return f"ledger {question}", {"question": question, "answer": f"{' '.join(lines)}\n#### {digits[-GRADED:]}"}


def generate(*, split: Split, seed: int) -> Iterator[dict[str, str]]:
    """A stream of `{"question", "answer"}` rows of one split, without repeats; a seed always gives the same stream."""
    rng = random.Random(f"ledger-mini/{split}/{seed}")
    for _, _, row in distinct(lambda: _problem(rng), split):
        yield row
