"""Reports of one sweep and tables of several, made only from their rows, without a model or a cluster."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from jobs.command_line import JsonFile, Overwrite, with_default
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.command_line import Main, command
from mbd_core.evaluation.sweep.choice.best import BEST, By
from mbd_core.fields import DATA, DECODING, MODEL, OUTPUT, Flag
from mbd_core.files import check_target_folder, folder_beside, write_json

if TYPE_CHECKING:
    from mbd_core.tables import Table

KIND = "sweep report"
Folders = Annotated[
    tuple[Path, ...],
    Flag("Folders that sweeps or their shards wrote, their --out.", DATA, positional=True, metavar="DIR..."),
]


def report(
    folders: Folders,
    out: Annotated[
        Path | None,
        Flag("Folder to write; several sweeps need one.", OUTPUT, metavar="DIR", default="the sweep's own"),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Rewrite one sweep's report, or join several sweeps into one, only from their rows.

    python jobs/report_sweep.py out/shard-1 out/shard-2 --out out/joined

    Shards of one sweep give the report of the sweep. Sweeps of different models, methods or problems are joined if no
    two of them hold the same sample. The report of an unfinished sweep holds its finished samples.
    """
    from mbd_core.evaluation.report.summary import rewrite_summary, summarize_sweeps
    from mbd_core.evaluation.sweep.folder import REPORT

    if out is None:
        if overwrite:
            raise ValueError("--overwrite replaces the folder of --out: give --out, or leave --overwrite out")
        if len(folders) > 1:
            raise ValueError("several sweeps are joined in a folder of their own: give --out")
        summary = rewrite_summary(folders[0])
    else:
        check_target_folder(out, KIND, overwrite=overwrite)
        summary = summarize_sweeps(folders)
        with folder_beside(out, KIND, overwrite=overwrite) as new_folder:
            for name, content in summary.files.items():
                (new_folder / name).write_bytes(content)
    print(summary.headlines)
    print(f"The report is in {out or folders[0]}: report.md, report.html, {REPORT}, plot.png")
    if summary.num_samples < summary.num_planned:
        print(f"report_sweep: note: {summary.num_samples} of {summary.num_planned} samples are there", file=sys.stderr)


def best(
    folders: Folders,
    folder: Annotated[
        tuple[Path, ...],
        Flag(
            "A swept model's folder; its files show which model of the sweep it is. Repeatable.", OUTPUT, metavar="DIR"
        ),
    ],
    by: Annotated[By, Flag(f"How the best is chosen: {BEST}", DATA)] = "accuracy",
) -> None:
    """Write each model's best configuration into its generation_config.json, which engine and endpoint read.

    python jobs/report_sweep.py best out/sweep --by knee --folder out/model
    """
    from mbd_core.evaluation.report.best_choice import best_points, models_of, written_best

    targets = models_of(folders, [model_folder(str(path)) for path in folder])
    for point in best_points(folders, list(targets), by):
        print(written_best(targets[point.model], point))


def front(
    sweep: Annotated[Path, Flag("The folder that a sweep wrote, its --out.", DATA, positional=True, metavar="DIR")],
    folder: Annotated[str, Flag("The model folder that gets the front.", OUTPUT, metavar="DIR")],
    model: Annotated[str | None, Flag("The model's name in the sweep.", MODEL, default="its only one")] = None,
    tasks: Annotated[tuple[str, ...], Flag("Tasks whose mean counts.", DATA, default="all", commas=True)] = (),
    overwrite: Annotated[bool, Flag("Replace a front that the folder has.", OUTPUT)] = False,
) -> None:
    """Write the Pareto front of a sweep (accuracy against tokens per forward) into a model's generation_config.json.

    python jobs/eval_sweep.py --models out/model --tasks gsm-mini --grid "tau_m2t=0.5,0.7,0.9;buffer_size=2,4"
    --out out/sweep; python jobs/report_sweep.py front out/sweep --folder out/model

    A server that loads the folder then takes "speed" in requests: 0 is the front's most accurate point, 1 its fastest.
    """
    from mbd_core.evaluation.report.speed_front import front_of, front_table, write_front
    from mbd_core.evaluation.sweep.folder import read_report

    points = front_of(read_report(sweep), model=model, tasks=tasks)
    write_front(model_folder(folder), points, overwrite=overwrite)
    print(front_table(points))


def seeds(folders: Folders, json_file: JsonFile = None) -> None:
    """One table of sweeps that differ only in their seed: mean and standard error over the seeds.

    for s in 0 1 2; do python jobs/eval_sweep.py --models ... --tasks ... --seed $s --out out/seed-$s; done;
    python jobs/report_sweep.py seeds out/seed-0 out/seed-1 out/seed-2
    """
    from mbd_core.evaluation.report.studies.seeds import seed_table

    show(seed_table(folders), json_file)


def transfer(
    chosen_on: Annotated[
        tuple[Path, ...], Flag("A sweep on which settings are chosen; repeatable.", DATA, metavar="DIR")
    ],
    reported_on: Annotated[
        tuple[Path, ...], Flag("A sweep of the same models and settings on other problems.", DATA, metavar="DIR")
    ],
    by: Annotated[
        Literal["accuracy", "knee"], Flag("The most accurate setting, or the knee of accuracy against TPF.", DATA)
    ] = "accuracy",
    json_file: JsonFile = None,
) -> None:
    """Decoding settings chosen on one task and used on other tasks, as a table.

    A sweep runs every model on every task, so models with different tasks need separate sweeps.
    """
    from mbd_core.evaluation.report.studies.setting_transfer import transfer_table

    show(transfer_table(chosen_on, reported_on, by=by), json_file)


def overlap(folders: Folders, json_file: JsonFile = None) -> None:
    """How many gsm-mini test problems have an arithmetic chain that occurs in training, and the accuracy on the rest.

    A chain is the sequence of an answer's equations, without the words around them. Problems are not stored: the
    sweeps' test problems and each recipe's training problems are generated again.
    """
    from mbd_core.evaluation.report.studies.chain_overlap import overlap_table, training_chains
    from mbd_core.multitf.data.prepared import TinyData
    from mbd_core.multitf.recipes.by_name import RECIPES

    generated = [recipe.data for recipe in RECIPES.values() if isinstance(recipe.data, TinyData)]
    streams = {(data.seed, data.per_task) for data in generated}
    show(overlap_table(folders, training_chains(streams)), json_file)


def pairs(
    folders: Folders,
    first: Annotated[str, Flag("A model's name in the sweeps.", MODEL)],
    second: Annotated[str, Flag("The other model's name.", MODEL)],
    task: Annotated[str, Flag("The task.", DATA)],
    tau_m2t: Annotated[float, Flag("The configuration's threshold.", DECODING)],
    buffer_size: Annotated[int, Flag("The configuration's slots.", DECODING)],
) -> None:
    """Two models on the same problems: how often only one of them is right, and the difference of their tokens per
    forward.

    python jobs/report_sweep.py pairs --first tiny-mbd --second tiny-tf --task gsm-mini --tau-m2t 0.9 --buffer-size 4
    out/seed-0 out/seed-1 out/tf-0 out/tf-1

    The answers are matched by seed and problem, so both models are swept with the same seeds. A difference is the
    first model's mean minus the second's, with the 95 % interval of a bootstrap over the problems. Answers to one
    problem under several seeds count together.
    """
    from mbd_core.evaluation.measures.statistics import p_text
    from mbd_core.evaluation.report.studies.paired_answers import load_answers, pair_answers

    sides = (
        load_answers(folders, model=model, task=task, tau_m2t=tau_m2t, buffer_size=buffer_size)
        for model in (first, second)
    )
    paired = pair_answers(*sides)
    print(
        f"{paired.num_problems} problems; only {first} right: {paired.first_only}, only {second}: {paired.second_only}"
    )
    print(f"sign test, two-sided: p {p_text(paired.p_value, equals='= ')}")
    print(f"accuracy: {paired.accuracy.text('+.2f')} points")
    for name, difference in (("TPF", paired.tpf), ("NFE", paired.nfe)):
        if difference is not None:
            print(f"{name}: {difference.text('+.3f')}, over the {paired.num_decoded} answers that both decoded")


def show(table: Table, json_file: Path | None) -> None:
    """Print a table, and write its rows if a file is named."""
    from mbd_core.tables import markdown

    print(markdown([table]), end="")
    if json_file is not None:
        write_json(json_file, {"rows": table.records})


SHOWN = "python jobs/report_sweep.py"
COMMANDS: Mapping[str, Main] = {
    "report": command(
        report,
        epilog="Other reports are sub-commands: best, front, seeds, transfer, overlap, pairs, each with --help. "
        "Write ./best for a folder named best.",
    ),
    **{
        run.__name__: command(run, f"{SHOWN} {run.__name__}") for run in (best, front, seeds, transfer, overlap, pairs)
    },
}


main = with_default(SHOWN, COMMANDS)

if __name__ == "__main__":
    sys.exit(main())
