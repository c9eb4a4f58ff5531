"""Decode traces of several models on the same problems: recorded into a folder, and read again without a model."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mbd_core.checkpoint.chat import question_prompt
from mbd_core.checkpoint.folder import ModelFolder, read_folder
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.files import write_json
from mbd_core.studies.trace_comparison import compared_decodings, record_run
from mbd_core.tasks.generated import GENERATED_TASKS
from mbd_core.trace.traced_run import TracedRun, read_run

RECORD = "traces.json"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What every model is asked, and how it decodes: `decoding` replaces fields of the model's own."""

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


def check_models(names: Sequence[str], asked: Asked) -> dict[str, ModelFolder]:
    """The models' folders by the name they have in tables; `ValueError` for what cannot be decoded or told apart."""
    if asked.task not in GENERATED_TASKS:
        raise ValueError(f"--task {asked.task} must be one of {', '.join(GENERATED_TASKS)}")
    if "buffer_size" in asked.decoding:
        raise ValueError("--decoding must not name buffer_size; that is --buffer-size")
    folders = {}
    for name in names:
        folder = read_folder(model_folder(name))
        short = folder.path.resolve().name
        if short in folders:
            raise ValueError(f"two of --models are called {short}; their rows could not be told apart")
        size = folder.config.block_size
        compared_decodings(folder.defaults, asked.decoding, block_size=size, buffer_size=asked.buffer_size)
        folders[short] = folder
    return folders


def record_models(folders: dict[str, ModelFolder], asked: Asked, target: Path) -> list[ModelTraces]:
    """Decode the problems with every model under MultiBD and write the traces, with their record, into `target`."""
    target.mkdir()
    task = GENERATED_TASKS[asked.task]
    problems = itertools.islice(task.generate(split="test", seed=asked.seed), asked.num_problems)
    questions = [problem[task.asked] for problem in problems]
    found = []
    for name, folder in folders.items():
        found.append(_record(name, folder, questions, asked, target))
    models = [
        {"name": m.name, "prompt_lengths": m.prompt_lengths, "decoding": m.decoding, "block_size": m.run.block_size}
        for m in found
    ]
    write_json(target / RECORD, {"asked": asdict(asked), "models": models})
    return found


def _record(name: str, folder: ModelFolder, questions: Sequence[str], asked: Asked, target: Path) -> ModelTraces:
    size = folder.config.block_size
    decodings = compared_decodings(folder.defaults, asked.decoding, block_size=size, buffer_size=asked.buffer_size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(folder.path, dtype=torch.float32 if device.type == "cpu" else None, device=device)
    prompts = [question_prompt(folder.tokenizer, text) for text in questions]
    recorded = record_run(
        model,
        prompts,
        target / f"{name}.parquet",
        method=name,
        decoding=decodings["MultiBD"],
        max_tokens=asked.max_tokens,
        vocab_limit=len(folder.tokenizer),
    )
    return ModelTraces(
        name=name,
        run=recorded.run,
        prompt_lengths=[len(prompt) for prompt in prompts],
        decoding=json.loads(json.dumps(asdict(decodings["MultiBD"]), default=str)),
    )


def read_models(folder: Path) -> tuple[list[ModelTraces], dict[str, Any]]:
    """The traces that `record_models` wrote, and what was asked; `ValueError`, one sentence, for any other folder."""
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
        asked = dict(record["asked"])
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
    return models, asked
