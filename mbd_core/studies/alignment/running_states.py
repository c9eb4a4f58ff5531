"""The states of MultiBD inference, of traces, and those of training, of a noise-schedule and a layout (paper App. A).

A state is the mask ratios of the blocks that a forward decodes, in their order. In a trace these are the ACTIVE slots:
the blocks before them are final, so under a block-causal mask a forward sees them as it sees the clean prefix in
training. In training they are the response blocks of a noise-group, as `corrupt` masks them.

Shape legend: S states, N slots, P problems.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mbd_core.multitf.example import Example
from mbd_core.multitf.sample import choose_layouts, corrupt
from mbd_core.multitf.states import StateConfig
from mbd_core.trace.traced_run import ACTIVE, RequestTrace, TracedRun, block_lives

PLACES = 6
"""Decimals of a mask ratio: traces hold what was computed in float32."""


@dataclass(frozen=True, kw_only=True, eq=False)
class States:
    """States of several problems.

    ratios_SN   NaN past a state's last block
    problem_S   which problem a state is of, from 0 to `num_problems` - 1
    num_idle    forwards of a trace that decoded nothing and are no states: they stored blocks only
    """

    ratios_SN: np.ndarray
    problem_S: np.ndarray
    num_problems: int
    num_idle: int = 0

    @property
    def sizes_S(self) -> np.ndarray:
        return (~np.isnan(self.ratios_SN)).sum(1)

    def __len__(self) -> int:
        return len(self.ratios_SN)

    def rows(self) -> list[list[float]]:
        """Each state as a list without padding."""
        return [row[:size].tolist() for row, size in zip(self.ratios_SN, self.sizes_S, strict=True)]


def inference_states(requests: Sequence[RequestTrace]) -> States:
    """Of every forward of every request the mask ratios of its ACTIVE slots."""
    rows, problems, num_idle = [], [], 0
    for number, request in enumerate(requests):
        for active_N, ratio_N in zip(request.state_TN == ACTIVE, request.mask_ratio_TN, strict=True):
            if active_N.any():
                rows.append(ratio_N[active_N].tolist())
                problems.append(number)
            else:
                num_idle += 1
    return _states(rows, problems, len(requests), num_idle)


def training_states(examples: Sequence[Example], config: StateConfig, *, draws: int, seed: int) -> States:
    """Of every example `draws` times the noise-groups of its layouts, each group once.

    Blocks of the prompt are clean in every layout, so they are no part of a state.
    """
    rows, problems = [], []
    size = config.block_size
    for number, example in enumerate(examples):
        rng = random.Random(f"{seed}/{number}")
        response = example.prompt_length // size
        first = response if config.span == "response" else 0
        for _ in range(draws):
            for layout in choose_layouts(len(example.tokens) // size - first, config, rng):
                noisy = corrupt(example, layout, start=first * size, config=config, mask_token_id=0, rng=rng)
                start = first
                for group in layout.sizes:
                    blocks = range(max(start, response), start + group)
                    start += group
                    if blocks:
                        rows.append([_ratio(noisy.masked, example, block, first, size) for block in blocks])
                        problems.append(number)
    return _states(rows, problems, len(examples), 0)


def decoded_examples(run: TracedRun, prompt_lengths: Sequence[int]) -> list[Example]:
    """Samples as long as what the requests stored, in whole blocks: what training would lay its layouts over.

    Their tokens mean nothing. The requests are named by their place in `prompt_lengths`.
    """
    assert run.block_size is not None
    examples = []
    for request in run.requests:
        prompt = prompt_lengths[int(request.request_id)]
        stored = [life.block + 1 for life in block_lives(request) if life.left]
        end = max(stored, default=prompt // run.block_size + 1) * run.block_size
        examples.append(Example((1,) * end, prompt))
    return examples


def _ratio(masked: Sequence[bool], example: Example, block: int, first: int, size: int) -> float:
    low, high = max(block * size, example.prompt_length), (block + 1) * size
    return sum(masked[low - first * size : high - first * size]) / (high - low)


def _states(rows: Sequence[Sequence[float]], problems: Iterable[int], num_problems: int, num_idle: int) -> States:
    ratios = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
    for place, row in zip(ratios, rows, strict=True):
        place[: len(row)] = row
    return States(
        ratios_SN=ratios.round(PLACES),
        problem_S=np.array(list(problems), dtype=np.int64),
        num_problems=num_problems,
        num_idle=num_idle,
    )
