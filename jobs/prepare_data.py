#!/usr/bin/env python3
"""Make training samples of your conversations: `python jobs/prepare_data.py chats.jsonl --model DIR --out data`.

Reads JSON lines, Parquet and Hugging Face datasets on disk, here or at URLs; needs no Ray without --workers. With
`--answers-from MODEL` that model answers the rows. The folder is what `jobs/train_multitf.py --data` takes. Exit
codes: 0 done, 1 it failed, 2 bad input, in one sentence on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if __name__ == "__main__":  # run by its path, it finds the project's packages beside it
    sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

import typer

from cluster.storage import Folder, fetch_model
from jobs.command_line import CLUSTER, DATA, DECODING, OUTPUT, ModelName, Overwrite, command, json_object
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.decoding.blocks.config import decoding_config
from mbd_core.decoding.blocks.methods import METHODS, MULTI, merge_fields
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.config import EngineConfig
from mbd_core.files import check_target_folder, folder_kind
from mbd_core.multitf.data.conversation_rows import Columns, find_files, read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mbd_core.evaluation.sweep.decoding import DecodingModel
    from mbd_core.evaluation.sweep.model_answers import Answering, DecodeParts, ModelAnswers

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE|DIR|URL...",
        help="JSON lines, JSON, Parquet or Arrow files, or folders of them.",
        rich_help_panel=DATA,
    ),
]
Split = Annotated[str | None, typer.Option(metavar="NAME", help="Of a dataset on disk.", rich_help_panel=DATA)]
Messages = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="Where the conversations are.",
        show_default="messages, conversations",
        rich_help_panel=DATA,
    ),
]
Prompt = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="Where the prompts are, if not in conversations.",
        show_default="prompt, question, instruction, problem",
        rich_help_panel=DATA,
    ),
]
Response = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN",
        help="Where their answers are.",
        show_default="response, answer, output, solution",
        rich_help_panel=DATA,
    ),
]
MaxLength = Annotated[
    int,
    typer.Option(min=2, help="Rows of more tokens, with their EOS, are counted and left out.", rich_help_panel=DATA),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Read only so many rows.", rich_help_panel=DATA)]
Against = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE",
        help="A benchmark's file; rows that repeat its problems are reported. May be given again.",
        rich_help_panel=DATA,
    ),
]
DropOverlap = Annotated[
    bool, typer.Option("--drop-overlap", help="Leave out the rows that --against reports.", rich_help_panel=DATA)
]
AnswersFrom = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Let this model answer the rows: a shipped model's name, a model folder, or its URL.",
        rich_help_panel=DECODING,
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"How it decodes: one of {', '.join(METHODS)}.",
        show_default="as its folder recommends",
        rich_help_panel=DECODING,
    ),
]
Decoding = Annotated[
    str | None,
    typer.Option(metavar="JSON", help='Fields of the method, as {"tau_m2t": 0.8}.', rich_help_panel=DECODING),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens of an answer, at most.", show_default="1024", rich_help_panel=DECODING),
]
Temperature = Annotated[
    float | None,
    typer.Option(help="0 takes the likeliest token, more draws.", show_default="0", rich_help_panel=DECODING),
]
AnswerSeed = Annotated[
    int | None,
    typer.Option("--seed", min=0, help="Of drawn answers.", show_default="0", rich_help_panel=DECODING),
]
KeepUnfinished = Annotated[
    bool | None,
    typer.Option(
        "--keep-unfinished",
        help="Keep answers that did not end within --max-tokens, as they are.",
        rich_help_panel=DECODING,
    ),
]
MaxRows = Annotated[
    int | None,
    typer.Option(min=1, help="Answers decoded at once.", show_default="16", rich_help_panel=DECODING),
]
Actors = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Engines that answer at once, actors with a GPU each if there are any, on the cluster of RAY_ADDRESS or "
        "on one of its own.",
        show_default="one in this process, without Ray",
        rich_help_panel=CLUSTER,
    ),
]
AnswersFolder = Annotated[
    str | None,
    typer.Option(
        "--answers",
        metavar="DIR",
        help="Where answers are kept as they come; the same command goes on from them.",
        show_default="OUT.answers",
        rich_help_panel=OUTPUT,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Tokenise by so many tasks of Ray Data, on the cluster of RAY_ADDRESS or one of its own; the same bytes.",
        show_default="in this process, without Ray",
        rich_help_panel=CLUSTER,
    ),
]
Out = Annotated[str, typer.Option(metavar="DIR|URL", help="Folder to write.", rich_help_panel=OUTPUT)]


def run(
    sources: Sources,
    *,
    model: ModelName,
    out: Out,
    split: Split = None,
    messages: Messages = None,
    prompt: Prompt = None,
    response: Response = None,
    max_length: MaxLength = 2048,
    limit: Limit = None,
    against: Against = None,
    drop_overlap: DropOverlap = False,
    answers_from: AnswersFrom = None,
    method: Method = None,
    decoding: Decoding = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: AnswerSeed = None,
    keep_unfinished: KeepUnfinished = None,
    max_rows: MaxRows = None,
    answers: AnswersFolder = None,
    actors: Actors = None,
    workers: Workers = None,
    overwrite: Overwrite = False,
) -> None:
    """Make a folder of training samples of conversations: templated, tokenised, filtered, compared with benchmarks.

    With --answers-from a model answers each row's prompt, all before its last answer, which it may lack.
    """
    from mbd_core.checkpoint.folder import read_folder
    from mbd_core.multitf.data.preparation import Benchmark, Preparation, check_prompts, prepare_data
    from mbd_core.multitf.data.prepared import DATA_KIND

    target = Folder.at(out)
    target.check_target(DATA_KIND, overwrite=overwrite)
    if drop_overlap and not against:
        raise ValueError("--drop-overlap needs the benchmarks' files: name them with --against")
    options = {
        "method": method, "decoding": decoding, "max_tokens": max_tokens, "temperature": temperature, "seed": seed,
        "keep_unfinished": keep_unfinished, "max_rows": max_rows, "answers": answers, "actors": actors,
    }  # fmt: skip
    answerer = None if answers_from is None else Answerer.find(answers_from, target, options)
    given = next((name for name, value in options.items() if value is not None), None)
    if answerer is None and given is not None:
        raise ValueError(f"--{given.replace('_', '-')} has no meaning without --answers-from: nothing is decoded")
    files = [file for source in sources for file in find_files(source, split=split)]
    chosen = (messages, prompt, response) != (None, None, None)
    preparation = Preparation(
        files=files,
        model=read_folder(model_folder(fetch_model(model))),
        max_length=max_length,
        columns=Columns(chat=messages, prompt=prompt, response=response, answered=not answerer) if chosen else None,
        benchmarks=[Benchmark.of(name, read_rows(find_files(name))) for name in against or ()],
        drop_overlap=drop_overlap,
        limit=limit,
    )
    with (
        cluster_of(workers, actors),
        target.staged(DATA_KIND, overwrite=overwrite) as folder,
        ExitStack() as answering,
    ):
        encode = None
        if workers is not None:
            from actors.training.data import encode_on_cluster

            encode = encode_on_cluster(model, num_workers=workers)
        if answerer is not None:
            num_rows = check_prompts(preparation, answerer.tokenizer)
            decoded = answering.enter_context(answerer.begin(num_rows, num_actors=actors))
            preparation = replace(preparation, answers=decoded)
        counts = prepare_data(preparation, folder, overwrite=overwrite, encode=encode)
    print(counts)
    for benchmark in preparation.benchmarks:
        overlap = benchmark.report()
        print(f"{benchmark.name}: {overlap['rows']} rows repeat {overlap['problems']} of its problems")
    print(f"wrote {target}" + (f"; the answers are kept in {answerer.folder}" if answerer is not None else ""))


@contextmanager
def cluster_of(workers: int | None, actors: int | None) -> Iterator[None]:
    """A connection to a cluster, if one is needed. Ray takes seconds to import."""
    if workers is None and actors is None:
        yield
        return
    import ray

    from cluster.failures import CLUSTER_FAILURES, reason
    from cluster.local import connect

    is_ours = connect(num_cpus=(workers or 0) + (actors or 0) + 1, worker_logs=False)
    try:
        yield
    except CLUSTER_FAILURES as error:
        raise RuntimeError(f"it failed on the cluster: {reason(error)}; the same command begins it again") from error
    finally:
        if is_ours:
            ray.shutdown()


@dataclass(frozen=True, kw_only=True)
class Answerer:
    """A model that answers, as the user named it, and its tokenizer; how it answers, and where answers are kept."""

    model: str
    tokenizer: PreTrainedTokenizerBase
    answering: Answering
    folder: Path

    @classmethod
    def find(cls, model: str, target: Folder, options: dict[str, Any]) -> Answerer:
        """Check everything before anything is decoded; `ValueError` for what cannot be."""
        from mbd_core.checkpoint.folder import model_digest, read_folder
        from mbd_core.evaluation.sweep.model_answers import ANSWERS_KIND, PART, Answering

        kept = Folder.at(options["answers"] or f"{target}.answers")
        if kept.is_remote:
            raise ValueError(f"{kept} is a URL: name a folder here that keeps the answers as they come with --answers")
        if folder_kind(kept.path) != ANSWERS_KIND:
            check_target_folder(kept.path, ANSWERS_KIND, in_place=True)
        name = options["method"] or MULTI
        if name not in METHODS:
            raise ValueError(f"--method {name}: known are {', '.join(METHODS)}")
        if (options["max_rows"] or 1) > PART:
            raise ValueError(f"--max-rows {options['max_rows']} must be at most {PART}")
        fields = merge_fields(METHODS[name], json_object(options["decoding"] or "{}", "--decoding"))
        folder = read_folder(model_folder(fetch_model(model)))
        answering = Answering(
            model=model,
            digest=model_digest(folder.path),
            decoding=decoding_config(folder.defaults, fields, block_size=folder.config.block_size),
            sampling=Sampling(temperature=options["temperature"] or 0.0, seed=options["seed"] or 0),
            max_tokens=options["max_tokens"] or 1024,
            keep_unfinished=bool(options["keep_unfinished"]),
            max_rows=options["max_rows"] or Answering.max_rows,
        )
        return cls(model=model, tokenizer=folder.tokenizer, answering=answering, folder=kept.path)

    @contextmanager
    def begin(self, num_rows: int, *, num_actors: int | None) -> Iterator[ModelAnswers]:
        """The answers of so many rows, by an engine here or by `num_actors` on the cluster; a model is loaded when the
        first answer is missing."""
        from mbd_core.evaluation.sweep.model_answers import PART, ModelAnswers, PartDecoder

        engine = EngineConfig(max_rows=self.answering.max_rows, buffer_size=self.answering.decoding.buffer_size)

        def load() -> DecodingModel:
            from mbd_core.evaluation.sweep.decoding import DecodingModel
            from mbd_core.serving.tokens.load import load_engine

            loaded = load_engine(model_folder(fetch_model(self.model)), engine)
            return DecodingModel(loaded.engine, loaded.tokenizer)

        decode: DecodeParts
        if num_actors is not None:
            from actors.training.data import AnswerPool

            decode, rows = AnswerPool(self.model, self.answering, engine, num_actors=num_actors), 4 * PART * num_actors
        else:
            decode, rows = PartDecoder(self.answering, load), PART
        answers = ModelAnswers(self.answering, decode, self.folder, rows_at_once=rows, num_rows=num_rows)
        with closing(answers), closing(decode):
            yield answers


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
