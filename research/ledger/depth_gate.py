"""Whether a model leaves room on ledger-mini: its accuracy, how deep its blocks are, how often they are at the floor.

A base that solves everything, or that fills a block in a forward or two, cannot show a loss or a gain. The gate is
measured on the valid split, before a study spends anything on the model.
"""

from dataclasses import dataclass
from pathlib import Path

from mbd_core.checkpoint.chat import decode_text, question_prompt
from mbd_core.decoding.blocks.request import Counts, Request
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.measures.statistics import mean, wilson_interval
from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.evaluation.tasks.graders import grade
from mbd_core.evaluation.tasks.problems import load_problems
from mbd_core.multitf.recipes.shipped import LEDGER_TASK
from mbd_core.serving.tokens.load import load_engine

ACCURACY = (70.0, 92.0)  # percent
LEAST_DEPTH = 4.0
MOST_AT_FLOOR = 0.2
ROWS = 16


@dataclass(frozen=True, kw_only=True)
class GateNumbers:
    """What was measured on `n` problems under one buffer size.

    depth      decoding forwards a block: those that only store are left out
    at_floor   the share of answers with as many decoding forwards as blocks, or fewer
    """

    n: int
    buffer_size: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    depth: float
    at_floor: float
    tpf: float

    @property
    def failures(self) -> list[str]:
        """What the gate asks of SingleBD and is not so."""
        found = []
        if not ACCURACY[0] <= self.accuracy <= ACCURACY[1]:
            found.append(f"accuracy {self.accuracy:.1f} % is not within {ACCURACY[0]:g} to {ACCURACY[1]:g} %")
        if self.depth < LEAST_DEPTH:
            found.append(f"{self.depth:.2f} decoding forwards a block are fewer than {LEAST_DEPTH:g}")
        if self.at_floor >= MOST_AT_FLOOR:
            most = f"{100 * MOST_AT_FLOOR:g} %"
            found.append(f"{100 * self.at_floor:.1f} % of the answers are at the floor, not fewer than {most}")
        return found


def measure_gate(
    model: Path, *, problems: int, tau: float, buffer_sizes: tuple[int, ...], seed: int = 0
) -> list[GateNumbers]:
    """The numbers of a model folder under each buffer size, on the same problems of the valid split."""
    task = find_task(LEDGER_TASK[0])
    asked = load_problems(task, split="valid", seed=seed, limit=problems).problems
    found = []
    for size in buffer_sizes:
        loaded = load_engine(model, EngineConfig(max_rows=ROWS, buffer_size=size))
        try:
            decoding = loaded.decoding({"buffer_size": size, "tau_m2t": tau})
            requests = [
                Request(
                    request_id=problem.problem_id,
                    prompt=tuple(question_prompt(loaded.tokenizer, problem.prompt)),
                    max_tokens=task.max_tokens,
                    decoding=decoding,
                )
                for problem in asked
            ]
            outputs = loaded.engine.generate(requests)
            texts = [decode_text(loaded.tokenizer, one.tokens) for one in outputs]
        finally:
            loaded.close()
        right = [grade(task, problem, text).correct for problem, text in zip(asked, texts, strict=True)]
        counts = [output.counts for output in outputs]
        found.append(gate_numbers(right, counts, buffer_size=size, block_size=decoding.block_size))
    return found


def gate_numbers(right: list[bool], counts: list[Counts], *, buffer_size: int, block_size: int) -> GateNumbers:
    """The numbers of graded answers, one or more."""
    blocks = [num_blocks(one, block_size) for one in counts]
    decoding = [one.num_forwards - one.num_store_forwards for one in counts]
    low, high = wilson_interval(sum(right), len(right))
    return GateNumbers(
        n=len(right),
        buffer_size=buffer_size,
        accuracy=100 * sum(right) / len(right),
        accuracy_low=100 * low,
        accuracy_high=100 * high,
        depth=sum(decoding) / sum(blocks),
        at_floor=mean([float(forwards <= of) for forwards, of in zip(decoding, blocks, strict=True)]),
        tpf=mean([one.tpf for one in counts]),
    )


def num_blocks(counts: Counts, block_size: int) -> int:
    """The blocks that an answer with its EOS lies in."""
    first = counts.num_prompt_tokens // block_size
    return -(-(counts.num_prompt_tokens + counts.num_tokens + 1) // block_size) - first
