"""A run's folder: its recipe, its rollouts and their scores, its learner's newest state, its numbers.

    run.json                          the recipe
    rollouts/00003/part-000.parquet   rollouts of iteration 3, and scores-000.parquet their rewards, a row each
    learner/00003.pt                  the learner after three iterations; a newer one takes its place
    iterations.jsonl                  a line an iteration; held_out.jsonl: a line a point of a front
    samples/00003.html                a page that replays two answers of an iteration
    model/                            the model, once all iterations are done

Every file is whole or not there. The learner's state says where a run is: rollouts of iterations before it have been
learned from, and are never read again. What lies there of later ones is used if the weights that made it are those
that the run goes on with, or older by no more than the schedule's lag, and removed otherwise.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from mbd_core.files import PartsFolder, check_target_folder, durable_file, folder_kind, is_partial, write_json
from mbd_core.rl.config import RLRecipe, as_recorded, other_settings

KIND = "reinforcement-learning run"
RECORD, ITERATIONS, HELD_OUT, PLOT, FAILURE, LOCK = (
    "run.json",
    "iterations.jsonl",
    "held_out.jsonl",
    "progress.png",
    "failure.txt",
    ".run.lock",
)
FILES = (
    *(RECORD, ITERATIONS, HELD_OUT, PLOT, FAILURE, LOCK, "log_ids.json"),
    *("rollouts/*/*.parquet", "learner/*.pt", "samples/*.html", "tensorboard/*", "model/*"),
)
PartTable = Literal["part", "scores"]


def check_run(path: Path, recipe: RLRecipe, *, resume: bool) -> None:
    """Raises `ValueError` if the folder holds something else, if a run is there without `resume` or missing with it,
    and if that run has other settings or has done more iterations than `recipe` asks."""
    is_there = folder_kind(path) == KIND and (path / RECORD).is_file()
    if is_there and not resume:
        raise ValueError(f"a run already lies in {path}; go on with --resume, or choose another --run-name")
    if resume and not is_there:
        raise ValueError(f"--resume: there is no run in {path}")
    if not is_there:
        check_target_folder(path, KIND, in_place=True)
    elif different := other_settings(json.loads((path / RECORD).read_text()), recipe):
        raise ValueError(
            f"--resume: the run in {path} was started with other settings ({RECORD}): {different}; give those, or "
            "another --run-name"
        )
    elif (done := max(_states(path), default=0)) > recipe.iterations:
        raise ValueError(
            f"--resume: the run in {path} has done {done} iterations, more than --iterations {recipe.iterations}, and "
            f"none is undone; give at least {done}"
        )


def _states(path: Path) -> list[int]:
    """After how many iterations the learner's states in a run's folder are."""
    return [int(state.stem) for state in (path / "learner").glob("*.pt") if state.stem.isdecimal()]


class RunFolder(PartsFolder):
    """The folder of one run, in which one process at a time writes. Raises `ValueError` as `check_run`, and while
    another process writes there."""

    def __init__(self, path: Path, recipe: RLRecipe, *, resume: bool) -> None:
        check_run(path, recipe, resume=resume)
        super().__init__(path, KIND, FILES, lock=LOCK)
        self.lag = recipe.lag
        write_json(path / RECORD, as_recorded(recipe))

    # The learner's state

    @property
    def done(self) -> int:
        """Iterations that the newest state has learned from; 0 without one."""
        return max(_states(self.path), default=0)

    @property
    def state(self) -> Path | None:
        """The newest state, `None` before the first."""
        return self.state_after(self.done) if self.done else None

    def state_after(self, iterations: int) -> Path:
        return (self.path / "learner") / f"{iterations:05d}.pt"

    def drop_older_states(self) -> None:
        """Remove all states but the newest."""
        done = self.done
        for iterations in _states(self.path):
            if iterations < done:
                self.state_after(iterations).unlink()

    # Rollouts

    def write(self, iteration: int, kind: PartTable, number: int, table: pa.Table) -> None:
        """Write a part's rollouts or their scores."""
        with durable_file(self._place(iteration, kind, number)) as beside:
            pq.write_table(table, beside)

    def drop_scores(self, iteration: int) -> None:
        """Remove the scores of an iteration's rollouts."""
        for path in self._place(iteration, "scores", 0).parent.glob("scores-*.parquet"):
            path.unlink()

    def has(self, iteration: int, kind: PartTable, number: int) -> bool:
        """Whether they are there."""
        return self._place(iteration, kind, number).exists()

    def read(self, iteration: int, kind: PartTable, number: int) -> pa.Table:
        """Those that are there."""
        return pq.read_table(self._place(iteration, kind, number))

    def drop_lost(self) -> int:
        """Remove the rollouts of iterations to come whose weights are too old, or were lost; how many there were."""
        done, num_dropped = self.done, 0
        for path in filter(is_partial, self.path.glob("rollouts/*/.*")):
            path.unlink()  # a killed process began it
        for path in sorted(self.path.glob("rollouts/*/part-*.parquet")):
            iteration = int(path.parent.name)
            if iteration < done:
                continue
            versions = pq.read_table(path, columns=["version"])["version"].to_pylist()
            if min(versions) < iteration - self.lag or max(versions) > done:
                path.with_name(path.name.replace("part-", "scores-")).unlink(missing_ok=True)
                path.unlink()
                num_dropped += len(versions)
        return num_dropped

    def _place(self, iteration: int, kind: PartTable, number: int) -> Path:
        return self.path / "rollouts" / f"{iteration:05d}" / f"{kind}-{number:03d}.parquet"

    # Numbers

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The lines of a file of numbers, without the lines of unfinished iterations."""
        return [line for line in self._lines(name) if line["iteration"] < self.done + (name == HELD_OUT)]

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        path = self.path / name
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            yield json.loads(line)

    def write_lines(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write a file of numbers whole."""
        with durable_file(self.path / name) as beside:
            beside.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
