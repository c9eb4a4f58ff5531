"""A run's folder, here or at a URL: its recipe, rollouts and their scores, its learner's newest state, its numbers.

    run.json                          the recipe
    rollouts/00003/part-000.parquet   rollouts of iteration 3, a row each
    rollouts/00003/scores-000.parquet their rewards, a row each
    learner/00003.pt                  the learner after three iterations; a newer state replaces it
    iterations.jsonl                  a line for each iteration
    held_out.jsonl                    a line for each point of a front
    samples/00003.html                a page that replays two answers of an iteration
    model/                            the model, once all iterations are done
    best/                             the model with the best front of held-out problems until now

Every file is complete or missing: no file grows. The learner's state says how far a run is: rollouts of earlier
iterations have been learned from, and are never read again. Rollouts of later iterations are used if their weights are
the weights of this state, or older by at most the schedule's lag. Other rollouts are removed.
"""

import io
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Literal, Self

import pyarrow as pa
import pyarrow.parquet as pq

from mbd_core.multitf.run.log import IDS
from mbd_core.rl.config import RLRecipe, as_recorded, other_settings
from mbd_core.storage.folder import Folder

KIND = "reinforcement-learning run"
RECORD, ITERATIONS, HELD_OUT, PLOT, FAILURE, LOCK = (
    "run.json",
    "iterations.jsonl",
    "held_out.jsonl",
    "progress.png",
    "failure.txt",
    ".run.lock",
)
MODEL, BEST = "model", "best"
STATES, PARTS = "learner/*.pt", "rollouts/*/part-*.parquet"
FILES = (
    *(RECORD, ITERATIONS, HELD_OUT, PLOT, FAILURE, LOCK, IDS),
    *("rollouts/*/*.parquet", STATES, "samples/*.html", "tensorboard/*", "model/*", "best/*"),
)
PartTable = Literal["part", "scores"]


def check_run(folder: Folder, recipe: RLRecipe, *, resume: bool) -> None:
    """Raises `ValueError` unless the folder can be written and holds a run (with `resume`) or nothing (without).

    A run that was killed before its record was written has decided nothing, and begins anew.
    A run to be resumed must have the settings of `recipe`, no more iterations than `recipe` asks for, and, if it has
    lines of iterations, its learner's state.
    """
    folder.check_writable()
    recorded = folder.read_text(RECORD) if folder.kind() == KIND else None
    if recorded is not None and not resume:
        raise ValueError(f"a run already lies in {folder}; go on with --resume, or choose another --run-name")
    if recorded is None:
        if resume:
            raise ValueError(f"--resume: there is no run in {folder}")
        if folder.kind() != KIND:
            folder.check_target(KIND, in_place=True)
        elif folder.files(STATES) or folder.files(PARTS):
            raise ValueError(
                f"{folder} holds the rollouts or the learner of a run without its {RECORD}; choose another --run-name"
            )
        return
    if different := other_settings(json.loads(recorded), recipe):
        raise ValueError(
            f"--resume: the run in {folder} was started with other settings ({RECORD}): {different}; give those, or "
            "another --run-name"
        )
    if (done := max(_states(folder), default=0)) > recipe.iterations:
        raise ValueError(
            f"--resume: the run in {folder} has done {done} iterations, more than --iterations {recipe.iterations}, "
            f"and none is undone; give at least {done}"
        )
    num_lines = sum(1 for _ in _lines(folder, ITERATIONS))
    if not done and num_lines > json.loads(recorded)["checkpoint_every"]:
        raise ValueError(
            f"--resume: the run in {folder} has numbers of {num_lines} iterations and no state of its learner "
            f"({STATES}); put its newest state there, or begin anew with another --run-name"
        )


def _states(folder: Folder) -> list[int]:
    """The learner's states in a run's folder, each by the number of iterations that it has learned from."""
    return [int(stem) for name in folder.files(STATES) if (stem := PurePosixPath(name).stem).isdecimal()]


def _lines(folder: Folder, name: str) -> Iterator[dict[str, Any]]:
    for line in (folder.read_text(name) or "").splitlines():
        yield json.loads(line)


def state_name(iterations: int) -> str:
    """The file of the learner's state after this number of iterations."""
    return f"learner/{iterations:05d}.pt"


class RunFolder:
    """The folder of one run, in which one process at a time writes; close it, or use it as a context.

    Raises `ValueError` as `check_run`, and while another process writes in a local folder. At a URL the newest process
    writes, and the next write of any other process raises `TakenOver`.
    """

    def __init__(self, folder: Folder, recipe: RLRecipe, *, resume: bool) -> None:
        check_run(folder, recipe, resume=resume)
        self.folder, self.lag = folder, recipe.lag
        self._claim = folder.claim(KIND, FILES, lock=LOCK)
        if resume:
            self.write_lines(ITERATIONS, self.lines(ITERATIONS))  # before the record: `check_run` compares both
        folder.write_text(RECORD, json.dumps(as_recorded(recipe), indent=2, allow_nan=False) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process write there."""
        self._claim.close()

    def check_ours(self) -> None:
        """Raises `TakenOver` if another process writes there."""
        self._claim.check()

    # The learner's state

    @property
    def done(self) -> int:
        """Iterations that the newest state has learned from; 0 without one."""
        return max(_states(self.folder), default=0)

    def drop_older_states(self, done: int) -> None:
        """Remove the states of fewer iterations than `done`. Raises `RuntimeError` if the state of `done` iterations,
        which the learner wrote, is not seen here."""
        states = _states(self.folder)
        if done not in states:
            raise RuntimeError(
                f"the learner wrote {self.folder / state_name(done)}, which is not seen on {socket.gethostname()}: "
                "give --storage a URL, or a folder that all machines share"
            )
        for iterations in states:
            if iterations < done:
                self.folder.remove(state_name(iterations))

    # Rollouts

    def write(self, iteration: int, kind: PartTable, number: int, table: pa.Table) -> None:
        """Write a part's rollouts or their scores."""
        self.check_ours()
        content = io.BytesIO()
        pq.write_table(table, content)
        self.folder.write_bytes(_part_name(iteration, kind, number), content.getvalue())

    def drop_scores(self, iteration: int) -> None:
        """Remove the scores of an iteration's rollouts."""
        self.check_ours()
        for name in self.folder.files(f"rollouts/{iteration:05d}/scores-*.parquet"):
            self.folder.remove(name)

    def has(self, iteration: int, kind: PartTable, number: int) -> bool:
        """Whether a part's rollouts or scores are there."""
        return self.folder.has(_part_name(iteration, kind, number))

    def read(self, iteration: int, kind: PartTable, number: int) -> pa.Table:
        """A part's rollouts or scores. Raises `OSError` if they are not there."""
        return self._table(_part_name(iteration, kind, number))

    def drop_lost(self, done: int) -> int:
        """Remove rollouts of iteration `done` and later iterations if their weights are too old or were lost.

        Returns the number of removed rollouts.
        """
        num_dropped = 0
        for name in self.folder.files(PARTS):
            iteration = int(PurePosixPath(name).parent.name)
            if iteration < done:
                continue
            versions = self._table(name)["version"].to_pylist()
            if min(versions) < iteration - self.lag or max(versions) > done:
                self.folder.remove(name.replace("/part-", "/scores-"))
                self.folder.remove(name)
                num_dropped += len(versions)
        return num_dropped

    def _table(self, name: str) -> pa.Table:
        content = self.folder.read_bytes(name)
        if content is None:
            raise OSError(f"{self.folder / name} is not there any more: somebody removed it")
        return pq.read_table(io.BytesIO(content))

    # Numbers

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The lines of a file of numbers, without the lines of unfinished iterations."""
        end = self.done + (name == HELD_OUT)
        return [line for line in _lines(self.folder, name) if line["iteration"] < end]

    def write_lines(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write a complete file of numbers."""
        self.check_ours()
        self.folder.write_text(name, "".join(json.dumps(line) + "\n" for line in lines))


def _part_name(iteration: int, kind: PartTable, number: int) -> str:
    return f"rollouts/{iteration:05d}/{kind}-{number:03d}.parquet"
