#!/usr/bin/env python3
"""Make training samples of your conversations: `python jobs/prepare_data.py chats.jsonl --model DIR --out data`.

Reads JSON lines, Parquet and Hugging Face datasets on disk, here or at URLs; needs no Ray without --workers. With
`--answers-from MODEL` that model answers the rows. The folder is what `jobs/train_multitf.py --data` takes. Exit
codes: 0 done, 1 it failed, 2 bad input, in one sentence on stderr.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

if __name__ == "__main__":  # run by its path, it finds the project's packages beside it
    sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from cluster.storage import Folder, fetch_model
from jobs.command_line import ModelName, Overwrite, command
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.decoding.blocks.config import decoding_config
from mbd_core.decoding.blocks.methods import METHODS, MULTI
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.config import EngineConfig
from mbd_core.files import check_target_folder, folder_kind
from mbd_core.json_text import merge_fields
from mbd_core.options import CLUSTER, DATA, DECODING, OUTPUT, Option
from mbd_core.row_files import read_row_files
from mbd_core.tables import plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mbd_core.checkpoint.folder import ModelFolder
    from mbd_core.evaluation.sweep.decoding import DecodingModel
    from mbd_core.evaluation.sweep.model_answers import Answering, DecodeParts, ModelAnswers
    from mbd_core.multitf.data.row_summary import RowSummary
    from mbd_core.tables import Table


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """How a model answers the rows; none has a meaning without the model."""

    answers_from: Annotated[
        str | None,
        Option(
            "Let this model answer the rows: a shipped model's name, a model folder, or its URL.",
            DECODING,
            metavar="MODEL",
        ),
    ] = None
    method: Annotated[
        str | None,
        Option(
            f"How it decodes: one of {', '.join(METHODS)}.",
            DECODING,
            metavar="NAME",
            default="as its folder recommends",
        ),
    ] = None
    decoding: Annotated[
        dict[str, Any] | None, Option('Fields of the method, as {"tau_m2t": 0.8}.', DECODING, metavar="JSON")
    ] = None
    max_tokens: Annotated[
        int | None, Option("Tokens of an answer, at most.", DECODING, at_least=1, default="1024")
    ] = None
    temperature: Annotated[float | None, Option("0 takes the likeliest token, more draws.", DECODING, default="0")] = (
        None
    )
    seed: Annotated[int | None, Option("Of drawn answers.", DECODING, at_least=0, default="0")] = None
    keep_unfinished: Annotated[
        bool | None,
        Option("Keep answers that did not end within --max-tokens, as they are.", DECODING, flag="--keep-unfinished"),
    ] = None
    max_rows: Annotated[int | None, Option("Answers decoded at once.", DECODING, at_least=1, default="16")] = None
    answers: Annotated[
        str | None,
        Option(
            "Where answers are kept as they come; the same command goes on from them.",
            OUTPUT,
            metavar="DIR",
            default="OUT.answers",
        ),
    ] = None
    actors: Annotated[
        int | None,
        Option(
            "Engines that answer at once, actors with a GPU each if there are any, on the cluster of RAY_ADDRESS or "
            "on one of its own.",
            CLUSTER,
            at_least=1,
            default="one in this process, without Ray",
        ),
    ] = None

    def __post_init__(self) -> None:
        names = [name for name, value in vars(self).items() if value is not None]
        if self.answers_from is None and names:
            option = names[0].replace("_", "-")
            raise ValueError(f"--{option} has no meaning without --answers-from: nothing is decoded")


def run(
    answering: AnswerOptions,
    *,
    sources: Annotated[
        tuple[str, ...],
        Option(
            "JSON lines, JSON, Parquet or Arrow files, or folders of them, as of a data set.",
            DATA,
            positional=True,
            metavar="FILE|DIR|URL...",
        ),
    ],
    model: ModelName,
    split: Annotated[
        str | None, Option("Of a folder with several splits, as train and test, read this one.", DATA, metavar="NAME")
    ] = None,
    messages: Annotated[
        str | None,
        Option("Where the conversations are.", DATA, metavar="COLUMN", default="messages, conversations"),
    ] = None,
    prompt: Annotated[
        str | None,
        Option(
            "Where the prompts are, if not in conversations.",
            DATA,
            metavar="COLUMN",
            default="prompt, question, instruction, problem, query, input, inputs",
        ),
    ] = None,
    response: Annotated[
        str | None,
        Option(
            "Where their answers are.",
            DATA,
            metavar="COLUMN",
            default="response, answer, output, solution, completion, target, targets",
        ),
    ] = None,
    system: Annotated[
        str | None,
        Option("Where the system prompts are.", DATA, metavar="COLUMN", default="system, system_prompt"),
    ] = None,
    tools: Annotated[
        str | None,
        Option("Where the functions are that may be called.", DATA, metavar="COLUMN", default="tools, functions"),
    ] = None,
    roles: Annotated[
        tuple[str, ...],
        Option(
            "What the data's own names of roles are: bot=assistant,narrator=system.",
            DATA,
            metavar="NAME=ROLE,...",
            separator=",",
        ),
    ] = (),
    ignore_columns: Annotated[
        tuple[str, ...],
        Option(
            "Columns that are not read, and fields of turns, as messages.weight.",
            DATA,
            metavar="NAME,...",
            separator=",",
        ),
    ] = (),
    max_length: Annotated[
        int, Option("Rows of more tokens, with their EOS, are counted and left out.", DATA, at_least=2)
    ] = 2048,
    answers_trained: Annotated[
        Literal["every", "last"] | None,
        Option(
            "Train every answer of a conversation, or the last one alone.",
            DATA,
            default="every; with --answers-from last",
        ),
    ] = None,
    weight: Annotated[
        tuple[float, ...],
        Option(
            "How often the rows of a source are in the data, 0.5 for every second row. One for each source, in order.",
            DATA,
            above=0,
            default="1",
        ),
    ] = (),
    show: Annotated[
        int, Option("Print so many rows as the model sees them, with what is trained marked.", OUTPUT, at_least=0)
    ] = 0,
    skip_bad: Annotated[
        bool, Option("Leave rows out that cannot be trained on; OUT/skipped.txt lists them.", DATA)
    ] = False,
    limit: Annotated[int | None, Option("Read only so many rows.", DATA, at_least=1)] = None,
    against: Annotated[
        tuple[str, ...],
        Option(
            "A benchmark's file, of any format that sweeps read; rows that repeat its problems are reported. May be "
            "given again.",
            DATA,
            metavar="FILE",
        ),
    ] = (),
    drop_overlap: Annotated[bool, Option("Leave out the rows that --against reports.", DATA)] = False,
    workers: Annotated[
        int | None,
        Option(
            "Tokenise by so many tasks of Ray Data, on the cluster of RAY_ADDRESS or one of its own; the same bytes.",
            CLUSTER,
            at_least=1,
            default="in this process, without Ray",
        ),
    ] = None,
    out: Annotated[
        str | None,
        Option("Folder to write.", OUTPUT, metavar="DIR|URL", default="with --show none: nothing is written"),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Make a folder of training samples of conversations: templated, tokenised, filtered, compared with benchmarks.

    With --answers-from a model answers each row's prompt, all before its last answer, which it may lack.
    """
    from mbd_core.checkpoint.folder import read_folder
    from mbd_core.multitf.data.benchmark_overlap import Benchmark
    from mbd_core.multitf.data.conversation_rows import Columns
    from mbd_core.multitf.data.data_files import find_files
    from mbd_core.multitf.data.preparation import Preparation, check_prompts, prepare_data, preview
    from mbd_core.multitf.data.prepared import DATA_KIND
    from mbd_core.multitf.data.row_summary import RowSummary

    if out is None and (not show or answering.answers_from is not None):
        raise ValueError("--out is missing: name the folder to write; --show alone prints rows and writes nothing")
    target = None if out is None else Folder.at(out)
    if target is not None:
        target.check_target(DATA_KIND, overwrite=overwrite)
    if drop_overlap and not against:
        raise ValueError("--drop-overlap needs the benchmarks' files: name them with --against")
    answerer = None
    if target is not None and answering.answers_from is not None:
        answerer = Answerer.find(answering.answers_from, target, answering)
    if weight and len(weight) != len(sources):
        raise ValueError(f"--weight is given {len(weight)} times for {len(sources)} sources: give one for each")
    columns = Columns(
        chat=messages,
        prompt=prompt,
        response=response,
        system=system,
        tools=tools,
        roles=dict(map(role_name, roles)),
        ignored=frozenset(ignore_columns),
        answered=not answerer,
    )
    groups = [find_files(source, split=split) for source in sources]
    files = [file for group in groups for file in group]
    weights = [number for number, group in zip(weight, groups, strict=True) for _ in group] if weight else None
    every = answers_trained == "every" or (answers_trained is None and answerer is None)
    folder_of_model = read_folder(model_folder(fetch_model(model)))
    preparation = Preparation(
        files=files,
        model=folder_of_model,
        max_length=max_length,
        columns=columns,
        benchmarks=[Benchmark.of(name, ((place, row) for _, place, row in read_row_files(name))) for name in against],
        drop_overlap=drop_overlap,
        limit=limit,
        weights=weights,
        every=every,
        skip_bad=skip_bad,
        readers=() if answerer is None else (folder_of_model.tokenizer, answerer.tokenizer),
    )
    summary = RowSummary(num_shown=show, ignored=columns.ignored)
    if target is None:
        counts = preview(preparation, summary)
        print_shown(summary, folder_of_model)
        print_table(summary.columns_table)
        print(f"the first {counts.num_read} rows were read; nothing is written without --out")
        return
    actors = answering.actors
    with (
        cluster_of(workers, actors),
        target.staged(DATA_KIND, overwrite=overwrite) as folder,
        ExitStack() as stack,
    ):
        encode = None
        if workers is not None:
            from actors.training.data import encode_on_cluster

            encode = encode_on_cluster(model, num_workers=workers, every=every, max_length=max_length)
        if answerer is not None:
            num_rows = check_prompts(preparation)
            decoded = stack.enter_context(answerer.begin(num_rows, num_actors=actors))
            preparation = replace(preparation, answers=decoded)
        counts = prepare_data(preparation, folder, overwrite=overwrite, encode=encode, summary=summary)
    print_shown(summary, folder_of_model)
    print_table(summary.columns_table)
    print_table(summary.samples_table)
    print(counts)
    for benchmark in preparation.benchmarks:
        overlap = benchmark.report()
        print(f"{benchmark.name}: {overlap['rows']} rows repeat {overlap['problems']} of its problems")
    print(f"wrote {target}" + (f"; the answers are kept in {answerer.folder}" if answerer is not None else ""))


def role_name(text: str) -> tuple[str, str]:
    """A data set's name of a role, and the role; `ValueError` for another form than `NAME=ROLE`."""
    name, sign, role = text.partition("=")
    if not (name and sign and role):
        raise ValueError(f"--roles {text} must be NAME=ROLE, as bot=assistant")
    return name, role


def print_shown(summary: RowSummary, model: ModelFolder) -> None:
    """The rows of --show, in colours on a terminal."""
    from mbd_core.multitf.data.encoding import fill_token
    from mbd_core.multitf.data.row_summary import show

    eos = fill_token(model.tokenizer, model.config)
    for sample in summary.shown:
        print(show(sample, model.tokenizer, eos, colour=sys.stdout.isatty()), end="\n\n")


def print_table(table: Table) -> None:
    """A table as wide as the terminal, and a blank line."""
    print(plain(table, width=shutil.get_terminal_size().columns), end="\n\n")


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
    def find(cls, model: str, target: Folder, options: AnswerOptions) -> Answerer:
        """Check everything before anything is decoded; `ValueError` for what cannot be."""
        from mbd_core.checkpoint.folder import model_digest, read_folder
        from mbd_core.evaluation.sweep.model_answers import ANSWERS_KIND, PART, Answering

        answers = Folder.at(options.answers or f"{target}.answers")
        if answers.is_remote:
            raise ValueError(
                f"{answers} is a URL: name a folder here that keeps the answers as they come with --answers"
            )
        if folder_kind(answers.path) != ANSWERS_KIND:
            check_target_folder(answers.path, ANSWERS_KIND, in_place=True)
        name = options.method or MULTI
        if name not in METHODS:
            raise ValueError(f"--method {name}: known are {', '.join(METHODS)}")
        if (options.max_rows or 1) > PART:
            raise ValueError(f"--max-rows {options.max_rows} must be at most {PART}")
        fields = merge_fields(METHODS[name], options.decoding or {})
        folder = read_folder(model_folder(fetch_model(model)))
        answering = Answering(
            model=model,
            digest=model_digest(folder.path),
            decoding=decoding_config(folder.defaults, fields, block_size=folder.config.block_size),
            sampling=Sampling(temperature=options.temperature or 0.0, seed=options.seed or 0),
            max_tokens=options.max_tokens or 1024,
            keep_unfinished=bool(options.keep_unfinished),
            max_rows=options.max_rows or Answering.max_rows,
        )
        return cls(model=model, tokenizer=folder.tokenizer, answering=answering, folder=answers.path)

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
