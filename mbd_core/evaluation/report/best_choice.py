"""The choice of each model's best configuration from the rows of its sweep, and where it is to be written."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from mbd_core.batch.timed_cases import Timing
from mbd_core.checkpoint.model_digest import model_digest
from mbd_core.evaluation.measures.summary import build_rows
from mbd_core.evaluation.report.summary import joinable_records, planned_samples, times_of
from mbd_core.evaluation.sweep.choice.best import BestPoint, By, check_halves, choose_best
from mbd_core.evaluation.sweep.choice.best_folder import FILE, check_best_folder, write_best
from mbd_core.evaluation.sweep.folder import read_record
from mbd_core.evaluation.sweep.gathered_samples import load_samples
from mbd_core.evaluation.sweep.shard import SweepShard
from mbd_core.evaluation.sweep.sweep import Sweep


def check_choice(
    sweep: Sweep, by: By, *, folders: Mapping[str, Path | None], shard: SweepShard, timing: Timing
) -> None:
    """Raise `ValueError` if the best configurations of a sweep that is yet to run could not be chosen or written.

    `folders` has each model's own folder; `None` for a model that lies elsewhere, for example at a URL.
    """
    for name, folder in folders.items():
        if folder is None:
            raise ValueError(
                f"--write-best cannot write into model '{name}', whose folder is not on this machine; sweep a folder"
            )
        check_best_folder(folder)
    if shard.count > 1:
        raise ValueError(
            f"--write-best needs all of a sweep, and --shard {shard} computes a part; join the shards with "
            "jobs/report_sweep.py best"
        )
    scored = [task.name for task in sweep.tasks if task.inputs.scores]
    if scored:
        raise ValueError(
            f"--write-best chooses how answers are decoded, and on {', '.join(scored)} nothing is decoded: "
            "log-likelihoods are compared there; choose on other tasks"
        )
    if by == "tps" and not timing.problems:
        raise ValueError("--write-best tps needs timed runs, and --timed 0 leaves them out; leave out --timed")
    check_halves({task.name: [problem.problem_id for problem in task.problems] for task in sweep.tasks})


def models_of(folders: Sequence[Path], model_folders: Sequence[Path]) -> dict[str, Path]:
    """A map from the sweeps' models to the folders with the same files. Raises `ValueError` if a folder matches no
    model, two folders match the same model, or a folder is not writable."""
    digests = {name: digest for folder in folders for name, digest in read_record(folder).plan["models"].items()}
    targets: dict[str, Path] = {}
    for model_folder in model_folders:
        check_best_folder(model_folder)
        digest = model_digest(model_folder)
        name = next((name for name, other_digest in digests.items() if other_digest == digest), None)
        if name is None:
            raise ValueError(
                f"{model_folder} holds none of the sweep's models, {', '.join(digests)}: its files differ"
            )
        if name in targets:
            raise ValueError(
                f"--folder {targets[name]} and --folder {model_folder} hold equal files, those of model '{name}'; "
                "give one of them"
            )
        targets[name] = model_folder
    return targets


def best_points(folders: Sequence[Path], models: Sequence[str], by: By) -> list[BestPoint]:
    """The best configuration of each model in the sweeps. Raises `ValueError` for unfinished sweeps, and the errors of
    `choose_best`."""
    num_planned, samples = planned_samples(joinable_records(folders)), load_samples(folders)
    num_samples = sum(map(len, samples.values()))
    if num_samples < num_planned:
        raise ValueError(
            f"a best configuration needs a finished sweep, and {num_samples} of {num_planned} samples are there"
        )
    times = times_of(folders, build_rows(samples))
    return [choose_best(samples, times, model=model, by=by) for model in models]


def written_best(folder: Path, point: BestPoint) -> str:
    """Write a chosen configuration into its model's folder. Returns the choice and its place in words."""
    write_best(folder, point)
    return f"\n{point.text}\nIt is the default of {folder / FILE}"
