"""The study of verified decoding: sweeps of all settings on two splits, a timing by turns, and a report of their rows.

    sweeps/SPLIT-MODEL  the sweeps, one a model
    valid.parquet       an answer a row, of the problems on which settings are chosen
    test.parquet        likewise, of the problems on which they are compared
    turns.parquet       requests of the chosen settings, timed one at a time and in turn
    lengths.parquet     exact answers by number of drafted slots, timed likewise (`lengths.py`)
    study.md            the report

No Ray: one process decodes. If it is killed, the same command goes on with the missing parts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from jobs.api.sweep_work import Subjects, run_work
from jobs.command_line import OutFolder, OwnThreads
from mbd_core.batch.timed_cases import Timing
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.command_line import command, refuse_given
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.sweep.shard import SweepShard
from mbd_core.fields import DATA, MODEL, Flag, Ge, Texts
from mbd_core.files import file_beside, write_text
from mbd_core.storage.folder import Folder
from research.verified.lengths import LENGTHS_FILE, length_lines, timed_lengths
from research.verified.report import REPORT, ROWS, TURNS, SplitAnswers, chosen_settings, report
from research.verified.settings import SUBJECTS, settings

if TYPE_CHECKING:
    from mbd_core.evaluation.sweep.sweep import Sweep
    from mbd_core.tasks.split import Split

MAX_ROWS = 64
COUNTS = ("num_tokens", "num_forwards", "num_drafted_tokens", "num_confirmed_tokens", "num_positions")
COLUMNS = pa.schema(
    [
        pa.field("model", pa.string()),
        pa.field("setting", pa.string()),
        pa.field("problem", pa.string()),
        pa.field("correct", pa.bool_()),
        *(pa.field(name, pa.int32()) for name in COUNTS),
    ]
)
StudyStage = Literal["valid", "test", "turns", "lengths", "report"]


def run(
    stage: Annotated[StudyStage, Flag("The stage, which needs the rows of the earlier stages.", positional=True)],
    *,
    out: OutFolder,
    models: Annotated[
        Texts, Flag("Models of the stage.", MODEL, metavar="NAME,...", commas=True, default="all of the study")
    ] = tuple(SUBJECTS),
    problems: Annotated[int, Ge(2), Flag("Problems of the stage.", DATA)] = 500,
    rounds: Annotated[int, Ge(1), Flag("Rounds of lengths.", DATA)] = 4,
    threads: OwnThreads = None,
) -> None:
    """Decode with every setting, choose on the valid split, compare on the test split, and judge the claims.

    valid, test: the sweeps of a split; several processes may share the models. turns: the chosen settings, one
    request at a time. lengths: one slot, two, and as many as the engine measures, one request at a time.
    report: the report of the rows that are there.
    """
    if unknown := [model for model in models if model not in SUBJECTS]:
        raise ValueError(f"--models {unknown[0]} has no task; give some of {', '.join(SUBJECTS)}")
    if stage != "lengths":
        refuse_given(run, f"in {stage}: lengths alone has rounds", rounds=rounds)
    if stage in ("turns", "report"):
        refuse_given(run, f"in {stage}, which takes all models", models=models)
    if stage == "report":
        refuse_given(run, "in report, which decodes nothing", problems=problems, threads=threads)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    if stage == "lengths":
        time_lengths(out, models, problems, rounds)
        return
    if stage == "turns":
        take_turns(out, problems)
    elif stage != "report":
        for model in models:
            sweep(out, model, stage, problems)
        gather(out, stage)
    if (out / ROWS["test"]).exists():
        text = report(out)
        write_text(out / REPORT, text)
        print(text)


def planned(model: str, split: Split, problems: int) -> Sweep:
    """The sweep of a model by all settings."""
    from mbd_core.evaluation.sweep.loading import load_inputs
    from mbd_core.evaluation.sweep.options import SweepOptions
    from mbd_core.evaluation.sweep.plan import plan_sweep

    options = SweepOptions(
        models=(model,),
        tasks=(SUBJECTS[model],),
        definitions=tuple(f"{name}={json.dumps(fields)}" for name, fields in settings().items()),
        methods=tuple(settings()),
        limit=problems,
        split=split,
        engine=EngineConfig(max_rows=MAX_ROWS),
    )
    return plan_sweep(load_inputs(options))


def sweep(out: Path, model: str, split: Split, problems: int) -> None:
    """Decodes a model's sweep; a finished one is kept."""
    from mbd_core.evaluation.sweep.run import SweepRun

    work = SweepRun.of(planned(model, split, problems), shard=SweepShard(), timing=Timing(problems=0))
    subjects = Subjects.find([model], (), ())
    run_work(Folder.at(str(out / "sweeps" / f"{split}-{model}")), work, subjects, cluster=None)


def gather(out: Path, split: Split) -> None:
    """Writes the rows of a split's sweeps as one file, without texts. Raises `ValueError` for an answer that could
    not be decoded."""
    from mbd_core.evaluation.sweep.folder import read_samples

    rows: list[Mapping[str, Any]] = []
    for model in SUBJECTS:
        folder = out / "sweeps" / f"{split}-{model}"
        if not (folder / "report.json").exists():  # another process decodes it
            continue
        for row in read_samples(folder, columns=("method", "problem_id", "correct", "error", *COUNTS)):
            if row["error"] is not None:
                raise ValueError(f"{folder}: {row['problem_id']} could not be decoded: {row['error']}")
            named = {"model": model, "setting": row["method"], "problem": row["problem_id"]}
            rows.append({**named, "correct": row["correct"], **{name: row.get(name) for name in COUNTS}})
    order = [(name, "ascending") for name in ("model", "setting", "problem")]
    _write(out / ROWS[split], pa.Table.from_pylist(rows, schema=COLUMNS).sort_by(order))


def take_turns(out: Path, problems: int) -> None:
    """Asks each problem of every chosen setting before the next problem, so that a busy machine slows all alike."""
    from mbd_core import LLM

    rows, valid = [], SplitAnswers.read(out / ROWS["valid"])
    for model in valid.of:
        chosen = list(dict.fromkeys(chosen_settings(valid, model).values()))
        questions = list({row["problem_id"]: row for row in planned(model, "test", problems).rows()}.values())
        with LLM(model, max_rows=1, buffer_size=max(settings()[name]["buffer_size"] for name in chosen)) as llm:
            asked = tqdm((questions[0], *questions), desc=model, unit="problem")
            for number, row in enumerate(asked):  # the first warms up
                for name in chosen:
                    began = time.perf_counter()
                    answer = llm.chat(row["prompt"], max_tokens=row["max_tokens"], decoding=dict(settings()[name]))
                    seconds = time.perf_counter() - began
                    if number:
                        rows.append(
                            {"model": model, "setting": name, "tokens": len(answer.tokens), "seconds": seconds}
                        )
    _write(out / TURNS, pa.Table.from_pylist(rows))


def time_lengths(out: Path, models: Sequence[str], problems: int, rounds: int) -> None:
    """Times the models' answers to test problems, writes the rows, and prints their table."""
    tables = []
    for model in models:
        sweep = planned(model, "test", problems)
        questions = {row["problem_id"]: row for row in sweep.rows()}
        folder = model_folder(sweep.models[model])
        tables.append(timed_lengths(model, folder, [*questions.values()], rounds=rounds))
    timed = pa.concat_tables(tables)
    _write(out / LENGTHS_FILE, timed)
    print("\n".join(length_lines(timed)))


def _write(path: Path, table: pa.Table) -> None:
    with file_beside(path) as file:
        pq.write_table(table, file, compression="zstd")


main = command(run, "python -m research verified", go_on="the same command goes on with the missing parts")
