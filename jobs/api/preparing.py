"""`prepare(rows, model=...)` makes training samples of conversations. The command `mbd prepare` calls it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import fsspec

from jobs.api.call_options import folder_of, options_from, plain_value, unknown
from jobs.api.model_answering import Answerer, AnswerOptions, cluster_of
from jobs.api.rows import names_of, rows_of
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.fields import CLUSTER, DATA, MODEL, MOST, OUTPUT, Flag, Ge, Gt, Le, Texts, configuration
from mbd_core.row_files.paths import read_row_files
from mbd_core.storage.folder import Folder
from mbd_core.storage.models import fetch_model
from mbd_core.tables import Table, markdown

if TYPE_CHECKING:
    from mbd_core.checkpoint.folder import ModelFolder
    from mbd_core.multitf.data.preparation import RowCounts
    from mbd_core.multitf.data.row_summary import RowSummary


@configuration(panel=DATA)
class PrepareOptions:
    """How rows are read, filtered and tokenised."""

    model: Annotated[str, Flag(panel=MODEL, name="--model", opened_by="workers")]
    """A shipped model's name, or a model folder."""
    split: Annotated[str | None, Flag(metavar="NAME")] = None
    """The split to read of a folder with several splits, as train and test."""
    messages: Annotated[str | None, Flag(metavar="COLUMN", default="messages, conversations, conversation")] = None
    """Column of the conversations."""
    prompt: Annotated[
        str | None, Flag(metavar="COLUMN", default="prompt, question, instruction, problem, query, input, inputs")
    ] = None
    """Column of the prompts, if there are no conversations."""
    response: Annotated[
        str | None, Flag(metavar="COLUMN", default="response, answer, output, solution, completion, target, targets")
    ] = None
    """Column of the answers to the prompts."""
    system: Annotated[str | None, Flag(metavar="COLUMN", default="system, system_prompt")] = None
    """Column of the system prompts."""
    tools: Annotated[str | None, Flag(metavar="COLUMN", default="tools, functions")] = None
    """Column of the functions that an answer may call."""
    roles: Annotated[Texts, Flag(metavar="NAME=ROLE,...", commas=True)] = ()
    """The roles that the data's own names stand for: bot=assistant,narrator=system."""
    ignore_columns: Annotated[Texts, Flag(commas=True)] = ()
    """Columns, or fields of turns as messages.weight, that are not read."""
    max_length: Annotated[int, Ge(2)] = 2048
    """Rows with more tokens, counting the EOS, are left out; the report counts them."""
    answers_trained: Annotated[Literal["every", "last"] | None, Flag(default="every; with --answers-from last")] = None
    """Train every answer of a conversation, or only the last."""
    weight: Annotated[tuple[Annotated[float, Gt(0), Le(MOST)], ...], Flag(default="1")] = ()
    """How often a source's rows enter the data; 0.5 takes every second row. One number for each source, in order."""
    show: Annotated[int, Ge(0), Flag(panel=OUTPUT)] = 0
    """Print this many rows as the model sees them, with the trained tokens marked."""
    skip_bad: bool = False
    """Leave out rows that cannot be trained on; OUT/skipped.txt lists them."""
    limit: Annotated[int | None, Ge(1)] = None
    """Read at most this many rows."""
    against: Annotated[Texts, Flag(metavar="FILE", opened_by="job")] = ()
    """A benchmark's file, in any format that sweeps read; rows that repeat its problems are reported. Repeatable."""
    drop_overlap: bool = False
    """Leave out the rows that --against reports."""
    workers: Annotated[int | None, Ge(1), Flag(panel=CLUSTER, default="in this process, without Ray")] = None
    """Tokenise in this many tasks of Ray Data, on the cluster of RAY_ADDRESS or on a new local cluster. The result is
    the same, byte for byte."""
    overwrite: Annotated[bool, Flag(panel=OUTPUT)] = False
    """Replace a folder that this command wrote before."""

    def __post_init__(self) -> None:
        if self.drop_overlap and not self.against:
            raise ValueError("--drop-overlap needs the benchmarks' files: name them with --against")


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A folder of training samples; `train(data=prepared)` learns from it.

    folder   its path or URL; `None` if rows were only shown
    counts   rows that were read, kept and left out
    tables   the meaning that was given to each column, and the samples' sizes
    overlap  for each benchmark of `against` the number of rows that repeat its problems
    answers  the folder of the model's answers, if a model answered
    """

    folder: str | None
    counts: RowCounts
    tables: tuple[Table, ...] = field(repr=False)
    overlap: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    answers: Path | None = None
    summary: RowSummary = field(repr=False)
    model: ModelFolder = field(repr=False)

    def __fspath__(self) -> str:
        if self.folder is None:
            raise ValueError("rows were only shown, and no training data was written; name a folder with out=")
        return self.folder

    def __str__(self) -> str:
        return f"{markdown(self.tables)}\n{self.counts}"

    def shown(self, *, colour: bool = False) -> list[str]:
        """The rows of `show` as the model sees them, with the trained tokens marked."""
        from mbd_core.multitf.data.encoding import fill_token
        from mbd_core.multitf.data.row_summary import show

        eos = fill_token(self.model.tokenizer, self.model.config)
        return [show(sample, self.model.tokenizer, eos, colour=colour) for sample in self.summary.shown]


def prepare(
    rows: Any,
    model: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    cluster: str | None = None,
    **options: Any,
) -> Prepared:
    """Make a folder of training samples of conversations: templated, tokenised, filtered.

    rows     a list of dictionaries, a table of pandas, polars, Arrow or datasets, or a path or URL, or several paths
    model    the model whose template and tokenizer are used: a shipped model's name, or a model folder
    out      the folder to write; default: a new temporary folder
    cluster  a Ray cluster for `workers` that tokenise and `actors` that answer: its address, `auto` for the cluster on
             this machine, `local` for a new cluster, or `RAY_ADDRESS` for the cluster that the variable names.
             Default: this process alone
    options  the options of the command `mbd prepare`, with `_` for `-`, as `max_length=1024`, `split="train"`

    Raises `ValueError`, in the command's words, for bad rows and for options that are not possible.
    """
    answer_names, own_names = AnswerOptions.__dataclass_fields__, PrepareOptions.__dataclass_fields__
    for name in options:
        if name not in own_names and name not in answer_names:
            raise unknown("keyword", name, {*own_names, *answer_names, "out", "cluster"})
    values = {name: value for name, value in options.items() if name in own_names} | {"model": os.fspath(model)}
    if isinstance(values.get("roles"), Mapping):
        values["roles"] = [f"{name}={role}" for name, role in values["roles"].items()]
    if isinstance(values.get("weight"), int | float):
        values["weight"] = [values["weight"]]
    for name in ("ignore_columns", "against"):
        if isinstance(values.get(name), str):
            values[name] = names_of(values[name], name)
    own = options_from(PrepareOptions, values)
    answering = options_from(AnswerOptions, {name: value for name, value in options.items() if name in answer_names})
    if answering.answers_from is not None and answering.answers is None and out is None:
        raise ValueError(
            f"answers_from={answering.answers_from} keeps its answers beside the data, from where the same call goes "
            "on: name a folder with out="
        )
    with folder_of(out, prefix="mbd-data-") as place, sources_of(rows) as sources:
        return prepare_chosen(own, answering, sources, place=place, cluster=cluster)


def prepare_chosen(
    own: PrepareOptions, answering: AnswerOptions, sources: Sequence[str], *, place: Folder | None, cluster: str | None
) -> Prepared:
    """`prepare` of files, with options that are built already. Without a place it only reads the rows to show."""
    from mbd_core.checkpoint.folder import read_folder
    from mbd_core.multitf.data.benchmark_overlap import Benchmark
    from mbd_core.multitf.data.conversation_rows import Columns
    from mbd_core.multitf.data.data_files import find_files
    from mbd_core.multitf.data.preparation import Preparation, check_prompts, prepare_data, preview
    from mbd_core.multitf.data.prepared import DATA_KIND
    from mbd_core.multitf.data.row_summary import RowSummary

    if place is None and (not own.show or answering.answers_from is not None):
        raise ValueError("--out is missing: name the folder to write; --show alone prints rows and writes nothing")
    if place is not None:
        place.check_target(DATA_KIND, overwrite=own.overwrite)
    answerer = None
    if place is not None and answering.answers_from is not None:
        answerer = Answerer.find(answering.answers_from, place, answering)
    if own.weight and len(own.weight) != len(sources):
        raise ValueError(f"--weight is given {len(own.weight)} times for {len(sources)} sources: give one for each")
    columns = Columns(
        chat=own.messages,
        prompt=own.prompt,
        response=own.response,
        system=own.system,
        tools=own.tools,
        roles=dict(map(role_name, own.roles)),
        ignored=frozenset(own.ignore_columns),
        answered=not answerer,
    )
    groups = [find_files(source, split=own.split) for source in sources]
    files = [file for group in groups for file in group]
    weight = own.weight
    weights = [number for number, group in zip(weight, groups, strict=True) for _ in group] if weight else None
    every = own.answers_trained == "every" or (own.answers_trained is None and answerer is None)
    model = read_folder(model_folder(fetch_model(own.model)))
    preparation = Preparation(
        files=files,
        model=model,
        max_length=own.max_length,
        columns=columns,
        benchmarks=[Benchmark.of(n, ((source, row) for _, source, row in read_row_files(n))) for n in own.against],
        drop_overlap=own.drop_overlap,
        limit=own.limit,
        weights=weights,
        every=every,
        skip_bad=own.skip_bad,
        readers=() if answerer is None else (model.tokenizer, answerer.tokenizer),
    )
    summary = RowSummary(num_shown=own.show, ignored=columns.ignored)
    if place is None:
        counts = preview(preparation, summary)
        return Prepared(folder=None, counts=counts, tables=(summary.columns_table,), summary=summary, model=model)
    models = {"--model": own.model} if own.workers is not None else {}
    if answering.answers_from is not None and answering.actors is not None:
        models["--answers-from"] = answering.answers_from
    with (
        cluster_of(cluster, own.workers, answering.actors, models) as paths,
        place.staged(DATA_KIND, overwrite=own.overwrite) as folder,
        ExitStack() as stack,
    ):
        encode = None
        if own.workers is not None:
            from actors.training.encoding import encode_on_cluster

            assert paths is not None
            encode = encode_on_cluster(
                own.model, num_workers=own.workers, every=every, max_length=own.max_length, paths=paths
            )
        if answerer is not None:
            num_rows = check_prompts(preparation)
            decoded = stack.enter_context(answerer.begin(num_rows, num_actors=answering.actors, paths=paths))
            preparation = replace(preparation, answers=decoded)
        counts = prepare_data(preparation, folder, overwrite=own.overwrite, encode=encode, summary=summary)
    return Prepared(
        folder=str(place),
        counts=counts,
        tables=(summary.columns_table, summary.samples_table),
        overlap={benchmark.name: benchmark.report() for benchmark in preparation.benchmarks},
        answers=None if answerer is None else answerer.folder,
        summary=summary,
        model=model,
    )


def role_name(text: str) -> tuple[str, str]:
    """The data set's name of a role, and the role. Raises `ValueError` if the text is not `NAME=ROLE`."""
    name, sign, role = text.partition("=")
    if not (name and sign and role):
        raise ValueError(f"--roles {text} must be NAME=ROLE, as bot=assistant")
    return name, role


@contextmanager
def sources_of(rows: Any) -> Iterator[list[str]]:
    """The source files of `prepare`: the named files, or for rows a file in memory that exists during the block.

    The memory file's name depends only on the rows, so that equal rows give equal bytes. Error messages say "rows"
    instead of the name.
    """
    if isinstance(rows, str | os.PathLike):
        yield [os.fspath(rows)]
        return
    if isinstance(rows, list | tuple) and rows and all(isinstance(row, str | os.PathLike) for row in rows):
        yield [os.fspath(row) for row in rows]
        return
    lines = []
    for number, row in enumerate(rows_of(rows, "rows"), start=1):
        try:
            lines.append(json.dumps(row, default=plain_value, ensure_ascii=False) + "\n")
        except (TypeError, ValueError) as error:
            raise ValueError(f"rows, row {number}: {error}") from None
    content = "".join(lines).encode("utf-8", errors="surrogatepass")
    system, path = fsspec.filesystem("memory"), f"/rows-{hashlib.sha256(content).hexdigest()[:12]}/rows.jsonl"
    system.pipe_file(path, content)
    url = f"memory:/{path}"
    try:
        yield [url]
    except ValueError as error:
        raise ValueError(str(error).replace(url, "rows")) from None
    finally:
        if system.exists(path):
            system.rm_file(path)
