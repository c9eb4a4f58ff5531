"""Report on block lengths: the options, the prompts and the model; `research.block_batch` does the study."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tqdm import tqdm

from jobs.command_line import MaxTokens, ModelName, OutFolder, Overwrite, Seed
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.command_line import CommandText, command, refuse_given
from mbd_core.evaluation.tasks.benchmarks import find_task
from mbd_core.evaluation.tasks.kinds.task import Problem, Task
from mbd_core.evaluation.tasks.problems import load_problems
from mbd_core.fields import DATA, DECODING, OUTPUT, Flag, Ge
from mbd_core.files import check_target_folder, folder_beside

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mbd_core.models.decoder import Decoder
    from research.block_batch.decoding import StudyDecoder, StudyPrompt

KIND = "branch report"
LENGTHS = (4, 8, 16, 32)
GENERATED_LIMIT = 16  # problems of a generated task, unless --limit says otherwise


def run(
    command_line: CommandText,
    *,
    model: ModelName,
    prompts: Annotated[Path | None, Flag("JSON lines with prompt or prompt_ids.", DATA, metavar="FILE")] = None,
    task: Annotated[
        str | None, Flag("A benchmark, whose answers are graded: gsm-mini, code-mini, gsm8k, humaneval.", DATA)
    ] = None,
    data: Annotated[
        str | None, Flag("The benchmark's file, if its problems are not generated.", DATA, metavar="FILE")
    ] = None,
    limit: Annotated[
        int | None, Ge(1), Flag("Prompts, at most (default: all of a file, 16 of a generated task)", DATA)
    ] = None,
    seed: Seed = 1729,
    max_tokens: MaxTokens = 128,
    block_lengths: Annotated[tuple[Annotated[int, Ge(1)], ...], Flag("Ascending.", DECODING, commas=True)] = LENGTHS,
    tau: Annotated[float | None, Flag("Confidence threshold (default: 0.9)", DECODING)] = None,
    decoding: Annotated[
        dict[str, Any] | None,
        Flag('More of the decoding, as {"canvas": {"branches": {"tau_sync": 16}}}.', DECODING, metavar="JSON"),
    ] = None,
    out: OutFolder,
    watch: Annotated[int, Ge(0), Flag("Watch the caches of this number of prompts, the first ones.", OUTPUT)] = 4,
    draw: Annotated[int, Ge(0), Flag("Draw pictures of this number of prompts, the first ones.", OUTPUT)] = 3,
    sketch: Annotated[int, Ge(1), Flag("Size of the vector to which a watched cache is projected.", OUTPUT)] = 256,
    overwrite: Overwrite = False,
) -> None:
    """Each block length alone, all of them under BlockBatch, and what happens to their caches.

    A line of the prompts' file is {"prompt": "text"} or {"prompt_ids": [1, 2, 3]}; ids need no tokenizer. Only the
    answers of a --task are graded. The model must have full attention (LLaDA, Dream, DiffuCoder). It needs no cluster
    and runs on the GPU if there is one. DIR gets report.md, report.json and PNG files.
    """
    from mbd_core.checkpoint.config import load_config
    from research.block_batch.decoding import StudyDecoder, check_prompts, compared_canvases
    from research.block_batch.report import write_branch_report

    check_target_folder(out, KIND, overwrite=overwrite)
    if (prompts is None) == (task is None):
        raise ValueError("give either --prompts or --task")
    if not watch:
        refuse_given(run, "with --watch 0: no cache is projected", sketch=sketch, seed=seed)
    if data is not None and task is None:
        raise ValueError(f"--data {data} belongs to a --task; there is none")
    folder = model_folder(model)
    config = load_config(folder)
    canvases = compared_canvases(config, block_lengths, max_tokens=max_tokens, tau=tau, fields=decoding or {})
    if task is None:
        assert prompts is not None
        study_prompts, tokenizer = _prompts_of_file(prompts, folder, limit)
    else:
        study_prompts, tokenizer = _prompts_of_task(find_task(task), folder, limit, data)
    check_prompts(study_prompts, config, max_tokens=max_tokens)
    decoder = StudyDecoder(
        model=_load(folder),
        canvases=canvases,
        max_tokens=max_tokens,
        vocab_limit=config.vocab_size if tokenizer is None else len(tokenizer),
        sketch_size=sketch,
        seed=seed,
    )
    with tqdm(total=len(study_prompts) * (len(block_lengths) + 1), desc="runs", file=sys.stderr) as bar:
        study = decoder.study(study_prompts, num_watched=watch, tick=partial(bar.update, 1))
    settings = {
        "command": command_line,
        "model": f"{model} ({config.architecture})",
        "prompts": f"{len(study_prompts)} from {task or prompts}",
        **_settings(decoder),
    }
    with folder_beside(out, KIND, overwrite=overwrite) as stage:
        text = write_branch_report(study, stage, draw=draw, settings=settings)
    print(text)
    print(f"report: {out / 'report.md'}, with report.json and the pictures beside it")


def _prompts_of_file(
    path: Path, folder: Path, limit: int | None
) -> tuple[list[StudyPrompt], PreTrainedTokenizerBase | None]:
    """The prompts of a file, and the model's tokenizer if it has one. Texts need a tokenizer."""
    from mbd_core.checkpoint.folder import read_folder
    from research.block_batch.decoding import read_prompts, study_prompts

    lines = read_prompts(path, limit=limit)
    with_texts = any(line.text is not None for line in lines)
    tokenizer = read_folder(folder).tokenizer if with_texts or (folder / "tokenizer.json").exists() else None
    return study_prompts(lines, tokenizer), tokenizer


def _prompts_of_task(
    task: Task, folder: Path, limit: int | None, data: str | None
) -> tuple[list[StudyPrompt], PreTrainedTokenizerBase]:
    """A benchmark's problems, with the grades of their answers."""
    from mbd_core.checkpoint.chat import decode_text, question_prompt
    from mbd_core.checkpoint.folder import read_folder
    from research.block_batch.decoding import StudyPrompt

    tokenizer = read_folder(folder).tokenizer
    limit = limit or (GENERATED_LIMIT if task.generate is not None else None)

    def accuracy(problem: Problem, tokens: list[int]) -> float:
        return float(task.grade(problem, decode_text(tokenizer, tokens)).correct)

    return [
        StudyPrompt(
            name=problem.problem_id,
            ids=tuple(question_prompt(tokenizer, problem.prompt)),
            grade=partial(accuracy, problem),
        )
        for problem in load_problems(task, limit=limit, data=data).problems
    ], tokenizer


def _load(folder: Path) -> Decoder:
    import torch

    from mbd_core.checkpoint.loading import load_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return load_model(folder, dtype=torch.float32 if device.type == "cpu" else None, device=device)


def _settings(decoder: StudyDecoder) -> dict[str, Any]:
    import torch

    weights, block_batch = decoder.model.lm_head.weight, decoder.canvases.block_batch
    return {
        "max_tokens": decoder.max_tokens,
        "BlockBatch": str(block_batch.branches),
        "tau": block_batch.tau,
        "device": f"{weights.device.type}, {str(weights.dtype).removeprefix('torch.')}, torch {torch.__version__}",
        "sketch": f"{decoder.sketch_size} numbers, seed {decoder.seed}",
    }


main = command(run, "python -m research blocks")
