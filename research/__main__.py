"""The studies as one command: `python -m research NAME ...`; without a name it lists them."""

import sys

from jobs.command_line import sub_commands

COMMANDS = {
    "ledger": ("research.ledger.study", "the paper's claims on ledger-mini: runs, sweeps, verdicts with intervals"),
    "real": ("research.real.data", "the conversations of the study on a real model, and its unseen problems"),
    "compare": (
        "research.real.comparison",
        "a real model beside its own base: right answers, and speed",
    ),
    "calls-data": (
        "research.calls.data",
        "conversations that call Python's functions, and unseen questions",
    ),
    "calls": ("research.calls.report", "whether block diffusion is worse at calls by syntax or by choice"),
    "ship": ("research.real.ship", "a trained adapter as a shipped one"),
    "rl": ("research.rl.study", "what reinforcement learning adds to ledger-mbd: arms, seeds, verdicts"),
    "teacher": (
        "research.rl.teacher",
        "what ledger-mbd learns from itself at one slot, beside a reward and solutions",
    ),
    "long": ("research.rl.long", "ten thousand and a hundred thousand answers: rewards, a teacher, right solutions"),
    "signal": ("research.rl.signal", "how much of an update is signal: gradients of disjoint sets of answers"),
    "verified": ("research.verified.study", "drafts that the same weights verify, beside thresholds alone"),
    "gate": ("research.ledger.gate", "whether a model leaves room for the study on ledger-mini"),
    "alignment": (
        "research.alignment.study",
        "training's states beside inference's; a noise-schedule fitted to traces",
    ),
    "blocks": (
        "research.block_batch.study",
        "BlockBatch's analyses: what block lengths change, its branches' caches",
    ),
}

main = sub_commands("python -m research", COMMANDS)

if __name__ == "__main__":
    sys.exit(main())
