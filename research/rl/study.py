"""The study of reinforcement learning on ledger-mini: arms with several seeds, and a report from their rows alone.

    study.json          the arms and the size; a folder of another study is refused
    runs/ARM-sSEED      a run; its model is in `model`
    rows/ARM-sSEED.parquet, training/ARM-sSEED.parquet
                        its graded answers to unseen problems, and the numbers of its iterations
    rows.parquet, training.parquet, study.md, study.png
                        all rows that are there, and the report of them

No Ray: a process takes one piece after another. Several processes with the same command share the pieces, and another
process resumes a killed one's run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from jobs.command_line import OutFolder, OwnThreads
from mbd_core.command_line import command, refuse_given
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.tasks.problems import MOST_GENERATED
from mbd_core.fields import DATA, DECODING, MOST, OUTPUT, Flag, Ge, Le, configuration
from mbd_core.files import check_writable, file_beside, is_partial, write_json
from mbd_core.json_text import parse_json
from mbd_core.rl.config import HeldOutConfig, RLRecipe
from mbd_core.storage.folder import Folder
from research.ledger.plan import BASE, run_name, seeded
from research.rl.arms import ARMS, A

if TYPE_CHECKING:
    import pyarrow as pa

    from mbd_core.multitf.recipes.recipe import TrainingRecipe

RECORD = "study.json"
METHOD = "study"
START = {BASE: A.model}
TRAINED = (
    "iteration",
    "rollouts",
    "answers_learned",
    "correct",
    "tpf",
    "tokens",
    "labels",
    "kl_reference",
    "entropy",
    "d_max",
)
"""The numbers of an iteration that are kept. A number that an objective does not have is empty."""


@configuration(panel=DATA)
class ArmStudySize:
    """The size of a study. Seed `s` draws the problems and the answers of its runs, and the problems on which these
    runs and the start are evaluated."""

    seeds: Annotated[tuple[Annotated[int, Ge(0), Le(MOST)], ...], Flag(metavar="S,...", commas=True)] = (1, 2, 3)
    """Seeds."""
    problems: Annotated[int, Ge(2), Le(MOST_GENERATED)] = 200
    """Unseen problems a seed."""
    taus: Annotated[
        tuple[Annotated[float, Ge(0), Le(1)], ...], Flag(panel=DECODING, metavar="TAU,...", commas=True)
    ] = (0.8, 0.9)
    """Thresholds tau_m2t."""


def run(
    *,
    out: OutFolder,
    size: ArmStudySize,
    threads: OwnThreads = None,
    report_only: Annotated[bool, Flag("Write the report again, from the rows that are there.", OUTPUT)] = False,
) -> None:
    """Train the arms of the study of reinforcement learning, evaluate them, and judge its claims (research/rl).

    The same command computes what is missing. If it runs twice at once, both share the work.
    """
    from research.rl.report import report

    if report_only:
        refuse_given(run, "with --report-only", threads=threads, **vars(size))
    else:
        compute_arms(out, ARMS, size, threads)
    print(report(out))


def compute_arms(
    out: Path,
    arms: Mapping[str, RLRecipe | TrainingRecipe],
    size: ArmStudySize,
    threads: int | None,
    *,
    only: Sequence[str] = (),
    starts: Mapping[str, str] = START,
) -> None:
    """Compute the missing pieces of a study's arms, or of `only` some if it names any, by this number of threads.

    `starts` are the models that the arms begin from. Raises the errors of `ArmStudy`.
    """
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    ArmStudy(out, arms, size, starts).compute(only or tuple(arms))


class ArmStudy:
    """A study in its folder, which it claims. Raises `ValueError` if another study or anything else lies there."""

    def __init__(
        self,
        out: Path,
        arms: Mapping[str, RLRecipe | TrainingRecipe],
        size: ArmStudySize,
        starts: Mapping[str, str] = START,
    ) -> None:
        self.out, self.arms, self.size, self.starts = out, arms, size, starts
        record = {"size": asdict(size), "arms": {name: asdict(arm) for name, arm in arms.items()}}
        recorded = json.loads(json.dumps(record, default=str))
        path = out / RECORD
        check_writable(out, out)
        if path.exists() and parse_json(path.read_bytes(), str(path)) != recorded:
            raise ValueError(f"{out} holds a study of another size or of other arms; give another folder")
        if not path.exists():
            if out.exists() and not all(map(is_partial, out.iterdir())):
                raise ValueError(f"{out} exists already and holds no study; give a folder that is yet to be made")
            out.mkdir(parents=True, exist_ok=True)
            write_json(path, recorded)

    def compute(self, names: Sequence[str]) -> None:
        """Trains and evaluates the pieces of these arms, and of the starts, that no process has done or is doing.

        All of a seed come before those of the next.
        """
        from mbd_core.checkpoint.shipped import model_folder

        for seed in self.size.seeds:
            for name in (*self.starts, *names):
                with self._taken(name, seed) as is_ours:
                    if not is_ours:
                        continue
                    is_start = name in self.starts
                    model = model_folder(self.starts[name]) if is_start else self.train(name, seed)
                    _write(self._place("rows", name, seed), self.evaluate(model, name, seed))

    @contextmanager
    def _taken(self, name: str, seed: int) -> Iterator[bool]:
        """Yields whether a piece is missing and is this process's; during the block no other process takes it."""
        from filelock import FileLock, Timeout

        (self.out / "locks").mkdir(exist_ok=True)
        lock = FileLock(self.out / "locks" / run_name(name, seed))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            yield False
            return
        try:
            yield not self._place("rows", name, seed).exists()
        finally:
            lock.release()

    def _place(self, kind: str, name: str, seed: int) -> Path:
        return self.out / kind / f"{run_name(name, seed)}.parquet"

    def train(self, name: str, seed: int) -> Path:
        """The model of an arm's run, which resumes where it stopped."""
        arm, path = self.arms[name], self.out / "runs" / run_name(name, seed)
        if not isinstance(arm, RLRecipe):
            return _supervised(arm, seed, path / "model")
        import pyarrow as pa

        from mbd_core.rl.executor import LocalRLExecutor
        from mbd_core.rl.folder import ITERATIONS, RunFolder
        from mbd_core.rl.folder import RECORD as RUN
        from mbd_core.rl.loop import RLRun
        from mbd_core.rl.rollouts import RolloutPlan

        recipe = replace(arm, seed=seed, held_out=HeldOutConfig(evaluate_every=0), samples_every=0)
        plan = RolloutPlan.of(recipe, EngineConfig())
        with (
            closing(LocalRLExecutor(recipe, plan.engine, sleeps=False)) as executor,
            closing(RunFolder(Folder.at(path), recipe, resume=(path / RUN).is_file())) as folder,
        ):
            model = RLRun(plan, folder, executor).run().path
            lines = folder.lines(ITERATIONS)
        rows = [{"recipe": name, "seed": seed, **{column: line.get(column) for column in TRAINED}} for line in lines]
        _write(self._place("training", name, seed), pa.Table.from_pylist(rows))
        return model

    def evaluate(self, model: Path, name: str, seed: int) -> pa.Table:
        """The rows of a model on its seed's problems, in the rollouts' decoding made greedy, at each threshold."""
        from mbd_core.batch.parts import cut
        from mbd_core.evaluation.sweep.grading.part_grading import grade_table
        from mbd_core.evaluation.sweep.loading import load_inputs
        from mbd_core.evaluation.sweep.options import SweepOptions
        from mbd_core.evaluation.sweep.plan import plan_sweep
        from mbd_core.rl.rollouts import RolloutEngine
        from research.ledger.rows import study_rows

        sweep = plan_sweep(
            load_inputs(
                SweepOptions(
                    models=(str(model),),
                    tasks=(A.rollouts.task,),
                    definitions=(f"{METHOD}={json.dumps(A.rollouts.decoding)}",),
                    methods=(METHOD,),
                    grid=f"tau_m2t={','.join(map(str, self.size.taus))}",
                    limit=self.size.problems,
                    seed=seed,
                )
            )
        )
        parts = cut(list(sweep.rows()), rows_per_part=4 * sweep.engine.max_rows)
        with closing(RolloutEngine(str(model), sweep.engine)) as engine:
            samples = [row for part in parts for row in grade_table(engine.sweep(part.table())).to_pylist()]
        return study_rows(samples, {row["model"]: name for row in samples}, source=model)


def _supervised(arm: TrainingRecipe, seed: int, path: Path) -> Path:
    """The model of a run of `mbd train`, in this process; a killed run begins anew."""
    from mbd_core.multitf.run.start import StartingPoint
    from mbd_core.multitf.run.worker import settle_precision, train_worker
    from mbd_core.multitf.step.workers import ALONE

    if not path.exists():
        assert arm.base is not None
        recipe = seeded(arm, seed, base=arm.base, block_size=arm.states.block_size, steps=None, noise=None)
        start = settle_precision(StartingPoint.read(recipe), ALONE, None)
        train_worker(start, ALONE, "replicated", None, every=recipe.train.steps, log_targets=()).write(path)
    return path


def _write(path: Path, table: pa.Table) -> None:
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    with file_beside(path) as file:
        pq.write_table(table, file, compression="zstd")


main = command(run, "python -m research rl", go_on="the same command computes what is missing")
