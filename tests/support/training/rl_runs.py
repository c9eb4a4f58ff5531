"""Small runs of reinforcement learning on a random tiny model, and an executor that dies at a chosen call."""

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from safetensors.torch import load
from torch import Tensor

from mbd_core.batch.parts import NumberedTable
from mbd_core.engine.config import EngineConfig
from mbd_core.multitf.states.answer import ReplayedAnswer
from mbd_core.rl.config import HeldOutConfig, RLRecipe, RolloutConfig
from mbd_core.rl.executor import LocalRLExecutor
from mbd_core.rl.folder import ITERATIONS, PARTS, RunFolder
from mbd_core.rl.groups import GroupConfig
from mbd_core.rl.loop import RLRun
from mbd_core.rl.recipes import ADAMW
from mbd_core.rl.rewards import RewardConfig
from mbd_core.rl.rollouts import RolloutPlan
from mbd_core.storage.folder import Folder

ENGINE = EngineConfig(max_rows=4, num_pages=100)
DIGITS = {"rl_rewards:digits": 1.0}


def tiny_run(model: Path | str, **changes: Any) -> RLRecipe:
    """Two parts of one group of four answers of at most 8 tokens, in an iteration. Every group teaches: by TPF, which
    differs at a low threshold."""
    recipe = RLRecipe(
        name="tiny",
        model=str(model),
        rollouts=RolloutConfig(
            task="gsm-mini",
            fresh_problems=False,  # among these, every group teaches
            prompts=2,
            group=4,
            part_rows=4,
            max_tokens=8,
            decoding={"buffer_size": 3, "tau_m2t": 0.05},
        ),
        rewards=RewardConfig(rewards={"tpf": 1.0}),
        groups=GroupConfig(advantages="joint", least_right=0.0, least_tpf_range=0.0),
        train=replace(ADAMW, lr=1e-2, warmup=0),
        held_out=HeldOutConfig(evaluate_every=0),
        samples_every=0,
        iterations=3,
    )
    return replace(recipe, **changes)


class Killed(BaseException):
    """The process ended here."""


class WatchedExecutor(LocalRLExecutor):
    """Notes what the learner is given, by the iteration's version, and ends at the `ends_at`-th of its calls."""

    def __init__(self, recipe: RLRecipe, engine: EngineConfig, *, ends_at: int | None = None) -> None:
        super().__init__(recipe, engine, sleeps=True)
        self.calls: list[str] = []
        self.taught: list[tuple[tuple[Any, ...], ...]] = []
        self._ends_at = ends_at

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) == self._ends_at:
            raise Killed(name)

    def rollouts(self, parts: Sequence[NumberedTable]) -> Iterator[NumberedTable]:
        for part in super().rollouts(parts):
            self._call("rollouts")
            yield part

    def scores(self, tables: Iterable[NumberedTable]) -> Iterator[NumberedTable]:
        for part in super().scores(tables):
            self._call("scores")
            yield part

    def update(self, answers: Sequence[ReplayedAnswer]) -> Mapping[str, float]:
        self._call("update")
        report = super().update(answers)
        self.taught.append(tuple((answer.prompt, answer.decided, answer.logprobs) for answer in answers))
        self._call("updated")
        return report

    def save(self, folder: Folder, name: str) -> None:
        self._call("save")
        super().save(folder, name)
        self._call("saved")

    def swap(self, version: int) -> None:
        super().swap(version)
        self._call("swap")


def finish(
    recipe: RLRecipe,
    folder: Path | Folder,
    *,
    resume: bool = False,
    ends_at: int | None = None,
    engine: EngineConfig = ENGINE,
) -> tuple[WatchedExecutor, dict[str, Tensor]]:
    """Run to the end, or to its end; the executor, and the model that was written."""
    plan = RolloutPlan.of(recipe, engine)
    executor = WatchedExecutor(recipe, plan.engine, ends_at=ends_at)
    try:
        with RunFolder(as_folder(folder), recipe, resume=resume) as claimed:
            model = RLRun(plan, claimed, executor).run()
        return executor, load(model.read_bytes("model.safetensors") or b"")
    except Killed:
        return executor, {}
    finally:
        executor.close()


def as_folder(place: Path | Folder) -> Folder:
    return place if isinstance(place, Folder) else Folder.at(place)


def rollout_rows(place: Path | Folder) -> dict[str, list[dict[str, Any]]]:
    """What was drawn, by the files in which it lies, without the times."""
    folder, drawn = as_folder(place), {}
    for name in folder.files(PARTS):
        rows = pq.read_table(io.BytesIO(folder.read_bytes(name) or b"")).to_pylist()
        drawn[name.removeprefix("rollouts/")] = [{**row, "seconds": None} for row in rows]
    return drawn


def number_lines(place: Path | Folder, name: str = ITERATIONS) -> list[dict[str, Any]]:
    """The lines of a file of numbers."""
    return [json.loads(line) for line in (as_folder(place).read_text(name) or "").splitlines()]


def timeless_lines(place: Path | Folder) -> list[dict[str, Any]]:
    """The numbers of iterations, without the times."""
    return [{name: value for name, value in line.items() if "seconds" not in name} for line in number_lines(place)]
