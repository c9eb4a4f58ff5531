"""The study of verified decoding: sweeps of all settings on two splits, a timing by turns, and a report of their rows.

    sweeps/SPLIT-MODEL  the sweeps, one a model
    valid.parquet       an answer a row, of the problems on which settings are chosen
    test.parquet        likewise, of the problems on which they are compared
    turns.parquet       requests of the chosen settings, timed one at a time and in turn
    lengths.parquet     exact answers by number of drafted slots, timed likewise (`lengths.py`)
    study.md            the report

No Ray: one process decodes. A model's rows are kept as soon as they are whole, and are measured once: the same command
goes on with the missing models.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from filelock import FileLock
from tqdm import tqdm

from jobs.api.sweep_work import Subjects, run_work
from jobs.command_line import OutFolder, OwnThreads
from mbd_core.batch.timed_cases import Timing
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.command_line import command, refuse_given
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.sweep.shard import SweepShard
from mbd_core.fields import DATA, MODEL, Flag, Ge, Texts
from mbd_core.files import check_writable, file_beside, write_text
from mbd_core.storage.folder import Folder
from research.verified.lengths import LENGTHS_FILE, length_lines, timed_lengths
from research.verified.report import (
    REPORT,
    ROWS,
    TURNS,
    chosen_settings,
    read_rows,
    report,
    valid_answers,
)
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
    check_writable(out, out)
    if stage == "report" and not (out / ROWS["test"]).exists():
        raise ValueError(f"{out} has no {ROWS['test']}: run valid and test first, or give another --out")
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    if stage == "lengths":
        time_lengths(out, models, problems, rounds)
        return
    if stage == "turns":
        take_turns(out, problems)
    elif stage != "report":
        if stage == "test":
            valid_answers(out, [*models, *rows_by_model(out / ROWS["test"])])
        for model in missing_models(out / ROWS[stage], models, {"problems": problems}):
            sweep(out, model, stage, problems)
            gather(out, stage, model)
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


def gather(out: Path, split: Split, model: str) -> None:
    """Adds the rows of a sweep to its split's file, without texts. Raises `ValueError` for an answer that could not
    be decoded."""
    from mbd_core.evaluation.sweep.folder import read_samples

    folder, rows = out / "sweeps" / f"{split}-{model}", list[Mapping[str, Any]]()
    for row in read_samples(folder, columns=("method", "problem_id", "correct", "error", *COUNTS)):
        if row["error"] is not None:
            raise ValueError(f"{folder}: {row['problem_id']} could not be decoded: {row['error']}")
        named = {"model": model, "setting": row["method"], "problem": row["problem_id"]}
        rows.append({**named, "correct": row["correct"], **{name: row.get(name) for name in COUNTS}})
    order = [(name, "ascending") for name in ("setting", "problem")]
    add_rows(out / ROWS[split], pa.Table.from_pylist(rows, schema=COLUMNS).sort_by(order))


def take_turns(out: Path, problems: int) -> None:
    """Asks each problem of every chosen setting before the next problem, so that a busy machine slows all alike."""
    from mbd_core import LLM

    valid = valid_answers(out)
    chosen = {model: list(dict.fromkeys(chosen_settings(valid, model).values())) for model in valid.of}
    for model, timed in rows_by_model(out / TURNS).items():
        if model in chosen and {*timed["setting"].to_pylist()} != {*chosen[model]}:
            raise ValueError(
                f"{out / TURNS} has times of other settings of {model} than {ROWS['valid']} chooses; move it"
            )
    for model in missing_models(out / TURNS, tuple(chosen), {"problems": problems}):
        rows, names = [], chosen[model]
        questions = list({row["problem_id"]: row for row in planned(model, "test", problems).rows()}.values())
        with LLM(model, max_rows=1, buffer_size=max(settings()[name]["buffer_size"] for name in names)) as llm:
            asked = tqdm((questions[0], *questions), desc=model, unit="problem")
            for number, row in enumerate(asked):  # the first warms up
                for name in names:
                    began = time.perf_counter()
                    answer = llm.chat(row["prompt"], max_tokens=row["max_tokens"], decoding=dict(settings()[name]))
                    seconds = time.perf_counter() - began
                    if number:
                        rows.append(
                            {"model": model, "setting": name, "tokens": len(answer.tokens), "seconds": seconds}
                        )
        add_rows(out / TURNS, pa.Table.from_pylist(rows))


def time_lengths(out: Path, models: Sequence[str], problems: int, rounds: int) -> None:
    """Times the models' answers to test problems, adds the rows to their file, and prints the file's table."""
    path = out / LENGTHS_FILE
    for model in missing_models(path, models, {"problems": problems, "rounds": rounds}):
        sweep = planned(model, "test", problems)
        questions = {row["problem_id"]: row for row in sweep.rows()}
        folder = model_folder(sweep.models[model])
        add_rows(path, timed_lengths(model, folder, [*questions.values()], rounds=rounds))
    print("\n".join(length_lines(read_rows(path))))


# -- files of rows ---------------------------------------------------------------------------------------------------


def rows_by_model(path: Path) -> dict[str, pa.Table]:
    """The rows of a file by model; none without the file."""
    if not path.exists():
        return {}
    table = read_rows(path)
    return {model: table.filter(pc.equal(table["model"], model)) for model in table["model"].unique().to_pylist()}


def missing_models(path: Path, models: Sequence[str], asked: Mapping[str, int]) -> list[str]:
    """The models whose rows a file lacks: rows are measured once. Raises `ValueError` for rows of a model that were
    measured with other options than those of `asked`."""
    kept = rows_by_model(path)
    for model in models:
        if model in kept and (found := measured_with(kept[model])) != asked:
            text = " and ".join(f"--{name} {value or 'unknown'}" for name, value in found.items())
            raise ValueError(f"{path} has rows of {model}, measured with {text}; give these, or another --out")
    return [model for model in dict.fromkeys(models) if model not in kept]


def measured_with(rows: pa.Table) -> dict[str, int | None]:
    """The options with which a model's rows were measured; `None` where the rows do not say it."""
    if "round" in rows.column_names:
        problems = rows["problems"][0].as_py() if "problems" in rows.column_names else None
        return {"problems": problems, "rounds": pc.max(rows["round"]).as_py()}
    return {"problems": len(rows) // len(rows["setting"].unique())}


def add_rows(path: Path, rows: pa.Table) -> None:
    """Adds a model's rows to a file, which several processes may do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")), file_beside(path) as file:
        tables = {**rows_by_model(path), rows["model"][0].as_py(): rows}
        pq.write_table(pa.concat_tables(tables.values(), promote_options="default"), file, compression="zstd")


main = command(run, "python -m research verified", go_on="the same command goes on with the missing parts")
