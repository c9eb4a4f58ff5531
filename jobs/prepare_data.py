#!/usr/bin/env python3
"""Make training samples of your conversations: `python jobs/prepare_data.py chats.jsonl --model DIR --out data`.

Reads JSON lines, Parquet and Hugging Face datasets on disk, here or at URLs; needs no Ray. The folder is what
`jobs/train_multitf.py --data` takes. Exit codes: 0 done, 1 it failed, 2 bad input, in one sentence on stderr.
"""

import sys
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":  # run by its path, it finds the project's packages beside it
    sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

import typer

from cluster.storage import Folder, fetch_model
from jobs.command_line import DATA, OUTPUT, ModelName, Overwrite, command
from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.multitf.conversation_rows import Columns, find_files, read_rows
from mbd_core.multitf.data_preparation import Preparation, prepare_data
from mbd_core.multitf.overlap import Benchmark
from mbd_core.multitf.prepared_data import DATA_KIND

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
    overwrite: Overwrite = False,
) -> None:
    """Make a folder of training samples of conversations: templated, tokenised, filtered, compared with benchmarks."""
    target = Folder.at(out)
    target.check_target(DATA_KIND, overwrite=overwrite)
    if drop_overlap and not against:
        raise ValueError("--drop-overlap needs the benchmarks' files: name them with --against")
    columns = (
        None
        if (messages, prompt, response) == (None, None, None)
        else Columns(chat=messages, prompt=prompt, response=response)
    )
    files = [file for source in sources for file in find_files(source, split=split)]
    preparation = Preparation(
        files=files,
        model=read_folder(model_folder(fetch_model(model))),
        max_length=max_length,
        columns=columns,
        benchmarks=[Benchmark.of(name, read_rows(find_files(name))) for name in against or ()],
        drop_overlap=drop_overlap,
        limit=limit,
    )
    with target.staged(DATA_KIND, overwrite=overwrite) as folder:
        counts = prepare_data(preparation, folder, overwrite=overwrite)
    print(counts)
    for benchmark in preparation.benchmarks:
        found = benchmark.report()
        print(f"{benchmark.name}: {found['rows']} rows repeat {found['problems']} of its problems")
    print(f"wrote {target}")


main = command(run)

if __name__ == "__main__":
    sys.exit(main())
