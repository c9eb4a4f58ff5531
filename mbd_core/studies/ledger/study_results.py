"""An experiment's results in the study's folder: what was measured of inference, the rows, and the report of both."""

from dataclasses import replace
from pathlib import Path

from mbd_core.checkpoint.folder import read_folder
from mbd_core.evaluation.tasks import find_task
from mbd_core.files import folder_beside
from mbd_core.multitf.ledger_recipes import ABLATION_ROWS, LEDGER_TASK
from mbd_core.multitf.noise_file import write_noise
from mbd_core.studies.alignment.recorded_traces import Asked, record_models
from mbd_core.studies.ledger.claims import CLAIM_TAU
from mbd_core.studies.ledger.paired_bootstrap import Bootstrap
from mbd_core.studies.ledger.row_distances import (
    correlations,
    distance_lines,
    measure_rows,
    read_distances,
    write_distances,
)
from mbd_core.studies.ledger.study_plan import DISTANCES, NOISE, Experiment, row_files
from mbd_core.studies.ledger.study_report import NAMES, write_report
from mbd_core.studies.ledger.study_rows import read_rows

INFERENCE = "inference"
TRACED_SLOTS = 4
DRAWS = 8


def measure_inference(out: Path, base: Path, *, num_problems: int) -> Path:
    """The file of noise fitted to the base's traces under MultiBD, with the distances of all rows beside it; measured
    once, before anything is trained with it."""
    folder = out / "alignment" / INFERENCE
    if not folder.exists():
        asked = Asked(
            task=LEDGER_TASK[0],
            num_problems=num_problems,
            seed=0,
            max_tokens=find_task(LEDGER_TASK[0]).max_tokens,
            buffer_size=TRACED_SLOTS,
            decoding={"tau_m2t": CLAIM_TAU},
        )
        with folder_beside(folder, "measured inference") as beside:
            model = read_folder(base)
            (traces,) = record_models({"base": model}, asked, beside / "traces")
            size = model.config.block_size  # a study trains in its base's blocks
            states = {recipe.name: replace(recipe.states, block_size=size) for recipe in ABLATION_ROWS.values()}
            distances, noise = measure_rows(traces, states, draws=DRAWS, seed=0)
            write_distances(beside / DISTANCES, distances)
            write_noise(beside / NOISE, noise)
    return folder / NOISE


def report(out: Path, experiment: Experiment) -> str:
    """Write the report of an experiment from its rows and those before it, and for alignment its distances.

    Returns the Markdown. Raises `ValueError` if they are not there.
    """
    folder = out / experiment
    rows = read_rows(row_files(out, experiment))
    if experiment != "alignment":
        return write_report(folder, experiment, rows)
    distances, bootstrap = read_distances(folder / INFERENCE / DISTANCES), Bootstrap(rows)
    extra = distance_lines(distances, correlations(distances, rows, bootstrap), names=NAMES)
    return write_report(folder, experiment, rows, extra=extra)
