"""Whether a model leaves room on ledger-mini: its accuracy, its forwards a block, and the share of answers that need
only one forward a block, the floor.

A base that solves everything, or fills a block in a forward or two, cannot show a loss or a gain. The gate is measured
on the valid split, before a study spends anything on the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from jobs.command_line import ModelName, OwnThreads, Seed
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.command_line import command
from mbd_core.evaluation.measures.statistics import Interval, mean, percent_right
from mbd_core.fields import DATA, DECODING, Flag, Ge
from research.tables import table_lines

if TYPE_CHECKING:
    from mbd_core.decoding.answers.counts import Counts

HEADS = ("Slots", "n", "Accuracy [95 %]", "Decoding forwards a block", "At the floor", "TPF")
ACCURACY = (70.0, 92.0)  # percent
LEAST_DEPTH = 4.0
MOST_AT_FLOOR = 0.2
ROWS = 16


def run(
    model: ModelName,
    *,
    problems: Annotated[int, Ge(1), Flag("Problems of the valid split.", DATA)] = 500,
    tau: Annotated[float, Flag("The threshold.", DECODING, name="--tau-m2t")] = 0.9,
    buffers: Annotated[
        tuple[Annotated[int, Ge(1)], ...], Flag("Slots beside SingleBD's one.", DECODING, commas=True)
    ] = (1,),
    seed: Seed = 0,
    threads: OwnThreads = None,
) -> int:
    """Whether a model leaves room for the study on ledger-mini (research/ledger); exit code 1 if it does not.

    SingleBD must have an accuracy of 70 to 92 %, at least 4 decoding forwards a block, and fewer than 20 % of the
    answers at the least possible number of forwards.
    """
    import torch

    sizes = (1, *(size for size in buffers if size > 1))
    if not 0.0 < tau < 1.0:
        raise ValueError(f"--tau-m2t {tau:g} must lie between 0 and 1")
    folder = model_folder(model)
    if threads is not None:
        torch.set_num_threads(threads)
    numbers = measure_gate(folder, problems=problems, tau=tau, buffer_sizes=sizes, seed=seed)
    print("\n".join([*table_lines(HEADS, [row.cells for row in numbers], num_text=0), ""]))
    failures = numbers[0].failures
    print(f"the gate is not met: {'; '.join(failures)}" if failures else "the gate is met")
    return 1 if failures else 0


@dataclass(frozen=True, kw_only=True)
class GateNumbers:
    """The measurements of `n` problems under one buffer size.

    depth      decoding forwards a block, without store-only forwards
    at_floor   the share of answers with one decoding forward a block, or fewer
    """

    n: int
    buffer_size: int
    accuracy: Interval
    depth: float
    at_floor: float
    tpf: float

    @property
    def cells(self) -> Sequence[object]:
        """The cells of a row in the table."""
        at_floor = f"{100 * self.at_floor:.1f} %"
        return self.buffer_size, self.n, self.accuracy.text(".1f"), f"{self.depth:.2f}", at_floor, f"{self.tpf:.2f}"

    @property
    def failures(self) -> list[str]:
        """The gate's conditions on SingleBD that fail."""
        failures = []
        if not ACCURACY[0] <= self.accuracy.value <= ACCURACY[1]:
            failures.append(f"accuracy {self.accuracy.value:.1f} % is not within {ACCURACY[0]:g} to {ACCURACY[1]:g} %")
        if self.depth < LEAST_DEPTH:
            failures.append(f"{self.depth:.2f} decoding forwards a block are fewer than {LEAST_DEPTH:g}")
        if self.at_floor >= MOST_AT_FLOOR:
            most_text = f"{100 * MOST_AT_FLOOR:g} %"
            failures.append(f"{100 * self.at_floor:.1f} % of the answers are at the floor, not fewer than {most_text}")
        return failures


def measure_gate(
    model: Path, *, problems: int, tau: float, buffer_sizes: tuple[int, ...], seed: int = 0
) -> list[GateNumbers]:
    """The numbers of a model folder under each buffer size, on the same problems of the valid split."""
    from mbd_core.checkpoint.chat import decode_text, question_prompt
    from mbd_core.decoding.blocks.request import Request
    from mbd_core.engine.config import EngineConfig
    from mbd_core.evaluation.tasks.benchmarks import find_task
    from mbd_core.evaluation.tasks.problems import load_problems
    from mbd_core.multitf.recipes.shipped import LEDGER_TASK
    from mbd_core.serving.tokens.load import load_engine

    task = find_task(LEDGER_TASK[0])
    of_split = load_problems(task, split="valid", seed=seed, limit=problems).problems
    numbers = []
    for size in buffer_sizes:
        loaded_model = load_engine(model, EngineConfig(max_rows=ROWS, buffer_size=size))
        try:
            decoding = loaded_model.decoding({"buffer_size": size, "tau_m2t": tau})
            requests = [
                Request(
                    request_id=problem.problem_id,
                    prompt=tuple(question_prompt(loaded_model.tokenizer, problem.prompt)),
                    max_tokens=task.max_tokens,
                    decoding=decoding,
                )
                for problem in of_split
            ]
            outputs = loaded_model.engine.generate(requests)
            texts = [decode_text(loaded_model.tokenizer, output.tokens) for output in outputs]
        finally:
            loaded_model.close()
        right = [task.grade(problem, text).correct for problem, text in zip(of_split, texts, strict=True)]
        counts = [output.counts for output in outputs]
        numbers.append(gate_numbers(right, counts, buffer_size=size, block_size=decoding.block_size))
    return numbers


def gate_numbers(right: list[bool], counts: list[Counts], *, buffer_size: int, block_size: int) -> GateNumbers:
    """The numbers of graded answers, one or more."""
    blocks = [num_blocks(answer, block_size) for answer in counts]
    decoding = [answer.num_forwards - answer.num_store_forwards for answer in counts]
    return GateNumbers(
        n=len(right),
        buffer_size=buffer_size,
        accuracy=percent_right(right),
        depth=sum(decoding) / sum(blocks),
        at_floor=mean(
            [
                float(forwards <= num_answer_blocks)
                for forwards, num_answer_blocks in zip(decoding, blocks, strict=True)
            ]
        ),
        tpf=mean([answer.tpf for answer in counts]),
    )


def num_blocks(counts: Counts, block_size: int) -> int:
    """The number of blocks of an answer, its EOS included."""
    first = counts.num_prompt_tokens // block_size
    return -(-(counts.num_prompt_tokens + counts.num_tokens + 1) // block_size) - first


main = command(run, "python -m research gate")
