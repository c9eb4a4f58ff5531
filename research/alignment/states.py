"""The states of MultiBD inference, from traces, and of training, from a noise-schedule and a layout (paper App. A).

A state is the mask ratios of the blocks that a forward decodes, in their order. In a trace these are the ACTIVE
slots: the blocks before them are final, so under a block-causal mask a forward sees them as it sees the clean
prefix in training. In training they are the response blocks of a noise-group, as `corrupt` masks them.

Shape legend: S states, N slots, P problems.
"""

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jobs.trace_comparison import compared_decodings, record_run
from mbd_core.checkpoint.chat import question_prompt
from mbd_core.checkpoint.folder import ModelFolder, read_folder
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.files import write_json
from mbd_core.multitf.data.example import Example
from mbd_core.multitf.states.fitted_noise import FittedNoise, fit_noise
from mbd_core.multitf.states.layout import StateConfig
from mbd_core.multitf.states.sample import choose_layouts, corrupt
from mbd_core.tasks.generated import GENERATED_TASKS
from mbd_core.trace.traced_run import ACTIVE, RequestTrace, TracedRun, block_lives, read_run

PLACES = 6
"""Decimals of a mask ratio, because traces hold float32 results."""


@dataclass(frozen=True, kw_only=True, eq=False)
class States:
    """States of several problems.

    ratios_SN   NaN past a state's last block
    problem_S   a state's problem, from 0 to `num_problems` - 1
    num_idle    forwards of a trace that only stored blocks; they are no states
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
    """The mask ratios of the ACTIVE slots in every forward of every request."""
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
    """The noise-groups of `draws` layouts of every example, each group once.

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
    """Samples with the lengths of the requests' stored blocks; training would lay its layouts over them."""
    assert run.block_size is not None
    examples = []
    for request in run.requests:
        prompt = prompt_lengths[int(request.request_id)]
        num_blocks = [life.block + 1 for life in block_lives(request) if life.has_left]
        end = max(num_blocks, default=prompt // run.block_size + 1) * run.block_size
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


RECORD = "traces.json"


@dataclass(frozen=True, kw_only=True)
class TracingPlan:
    """The problems that every model decodes; `decoding` replaces fields of the model's own decoding."""

    task: str
    num_problems: int
    seed: int
    max_tokens: int
    buffer_size: int | None
    decoding: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ModelTraces:
    """A model's trace, decoded as `decoding` says; request n has a prompt of `prompt_lengths[n]` tokens."""

    name: str
    run: TracedRun
    prompt_lengths: list[int]
    decoding: dict[str, Any]


def halves(traces: ModelTraces) -> tuple[FittedNoise, States, list[Example]]:
    """The noise fitted to even-numbered problems, the states of odd-numbered problems, and samples of the same lengths
    as the odd-numbered problems.

    Raises `ValueError` for fewer than two problems.
    """
    requests = sorted(traces.run.requests, key=lambda request: int(request.request_id))
    even_requests, odd_requests = ([r for r in requests if int(r.request_id) % 2 == half] for half in (0, 1))
    if not even_requests or not odd_requests:
        raise ValueError(f"{traces.name} has {len(requests)} traced problems; two halves need at least 2")
    fitting = inference_states(even_requests)
    noise = fit_noise(
        fitting.rows(), source=f"{traces.name}, {len(fitting)} forwards of {len(even_requests)} problems"
    )
    examples = decoded_examples(replace(traces.run, requests=tuple(odd_requests)), traces.prompt_lengths)
    return noise, inference_states(odd_requests), examples


def check_models(names: Sequence[str], plan: TracingPlan) -> dict[str, ModelFolder]:
    """The models' folders by their names in tables. Raises `ValueError` for models that cannot be decoded, or whose
    names are the same."""
    if plan.task not in GENERATED_TASKS:
        raise ValueError(f"--task {plan.task} must be one of {', '.join(GENERATED_TASKS)}")
    if "buffer_size" in plan.decoding:
        raise ValueError("--decoding must not name buffer_size; give --buffer-size instead")
    folders = {}
    for name in names:
        folder = read_folder(model_folder(name))
        folder_name = folder.path.resolve().name
        if folder_name in folders:
            raise ValueError(f"two of --models are called {folder_name}; their rows could not be told apart")
        size = folder.config.block_size
        compared_decodings(folder.defaults, plan.decoding, block_size=size, buffer_size=plan.buffer_size)
        folders[folder_name] = folder
    return folders


def record_models(folders: dict[str, ModelFolder], plan: TracingPlan, target: Path) -> list[ModelTraces]:
    """Decodes the problems with every model under MultiBD and writes the traces, with their record, into `target`."""
    target.mkdir()
    task = GENERATED_TASKS[plan.task]
    problems = itertools.islice(task.generate(split="test", seed=plan.seed), plan.num_problems)
    questions = [problem[task.question_column] for problem in problems]
    recorded = [_record(name, folder, questions, plan, target) for name, folder in folders.items()]
    models = [
        {"name": m.name, "prompt_lengths": m.prompt_lengths, "decoding": m.decoding, "block_size": m.run.block_size}
        for m in recorded
    ]
    write_json(target / RECORD, {"asked": asdict(plan), "models": models})
    return recorded


def _record(name: str, folder: ModelFolder, questions: Sequence[str], plan: TracingPlan, target: Path) -> ModelTraces:
    size = folder.config.block_size
    decodings = compared_decodings(folder.defaults, plan.decoding, block_size=size, buffer_size=plan.buffer_size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(folder.path, dtype=torch.float32 if device.type == "cpu" else None, device=device)
    prompts = [question_prompt(folder.tokenizer, text) for text in questions]
    recorded = record_run(
        model,
        prompts,
        target / f"{name}.parquet",
        method=name,
        decoding=decodings["MultiBD"],
        max_tokens=plan.max_tokens,
        vocab_limit=len(folder.tokenizer),
    )
    return ModelTraces(
        name=name,
        run=recorded.run,
        prompt_lengths=[len(prompt) for prompt in prompts],
        decoding=json.loads(json.dumps(asdict(decodings["MultiBD"]), default=str)),
    )


def read_models(folder: Path) -> tuple[list[ModelTraces], dict[str, Any]]:
    """The traces of `record_models`, and their plan. Raises `ValueError`, one sentence, for any other folder."""
    path = folder / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        models = [
            ModelTraces(
                name=model["name"],
                run=read_run(folder / f"{model['name']}.parquet", name=model["name"], block_size=model["block_size"]),
                prompt_lengths=list(map(int, model["prompt_lengths"])),
                decoding=dict(model["decoding"]),
            )
            for model in record["models"]
        ]
        plan = dict(record["asked"])
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}): give the traces folder of an earlier run"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no record of traces: {error} is missing or of another kind") from None
    for model in models:
        unknown = {r.request_id for r in model.run.requests} - {str(n) for n in range(len(model.prompt_lengths))}
        if unknown:
            raise ValueError(f"{path} has no prompt length of request '{min(unknown)}' of {model.name}")
    return models, plan
