#!/usr/bin/env python3
"""Make training samples of your conversations: `python jobs/prepare_data.py chats.jsonl --model DIR --out data`.

Reads JSON lines, Parquet and Hugging Face datasets on disk, here or at URLs. Only --workers needs Ray. With
`--answers-from MODEL` that model answers the rows. `jobs/train_multitf.py --data` takes the folder. Exit codes: 0
done, 1 it failed, 2 bad input, with one sentence on stderr.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":  # run by its path, it finds the project's packages beside it
    sys.path.insert(1, str(Path(__file__).resolve().parent.parent))

from jobs.api.call_options import OF_VARIABLE
from jobs.api.model_answering import AnswerOptions
from jobs.api.preparing import PrepareOptions, prepare_chosen
from mbd_core.command_line import command, refuse_given
from mbd_core.fields import DATA, OUTPUT, Flag
from mbd_core.storage.folder import Folder
from mbd_core.tables import plain


def run(
    answering: AnswerOptions,
    own: PrepareOptions,
    *,
    sources: Annotated[
        tuple[str, ...],
        Flag(
            "JSON lines, JSON, Parquet or Arrow files, or folders of such files.",
            DATA,
            positional=True,
            metavar="FILE|DIR|URL...",
            opened_by="job",
        ),
    ],
    out: Annotated[
        str | None,
        Flag(
            "Folder to write.",
            OUTPUT,
            metavar="DIR|URL",
            default="with --show none: nothing is written",
            opened_by="job",
        ),
    ] = None,
) -> None:
    """Make training samples of conversations: template, tokenise and filter them, and compare them with benchmarks.

    With --answers-from, a model writes the last answer of each row, in place of the row's own answer.
    """
    if out is None and own.show:
        refuse_given(run, "without --out: nothing is written", workers=own.workers, overwrite=own.overwrite)
        if not own.drop_overlap:
            refuse_given(run, "without --out and --drop-overlap: nothing is reported", against=own.against)
    place = None if out is None else Folder.at(out)
    done = prepare_chosen(own, answering, sources, place=place, cluster=OF_VARIABLE)
    for text in done.shown(colour=sys.stdout.isatty()):
        print(text, end="\n\n")
    width = shutil.get_terminal_size().columns
    print("\n\n".join(plain(table, width=width) for table in done.tables), end="\n\n")
    if place is None:
        print(f"the first {done.counts.num_read} rows were read; nothing is written without --out")
        return
    print(done.counts)
    for name, overlap in done.overlap.items():
        print(f"{name}: {overlap['rows']} rows repeat {overlap['problems']} of its problems")
    print(f"wrote {done.folder}" + ("" if done.answers is None else f"; the answers are kept in {done.answers}"))


main = command(run, go_on="the same command goes on from the answers of --answers-from that are finished")

if __name__ == "__main__":
    sys.exit(main())
