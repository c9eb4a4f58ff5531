"""Where a run computes: engines that make rollouts, processes that score them, and a learner. Without Ray, one engine
and the learner are in this process."""

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mbd_core.batch.parts import NumberedTable
from mbd_core.checkpoint.folder import read_folder
from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.sweep.grading.part_grading import grade_table
from mbd_core.multitf.config import Sharding
from mbd_core.multitf.run.teachers import find_teacher, load_teacher
from mbd_core.multitf.states.answer import ReplayedAnswer
from mbd_core.multitf.step.distiller import Distiller
from mbd_core.multitf.step.learner import Learner
from mbd_core.multitf.step.workers import ALONE, Workers
from mbd_core.rl.config import RLRecipe
from mbd_core.rl.rewards import Scorer
from mbd_core.rl.rollouts import RolloutEngine
from mbd_core.storage.folder import Folder
from mbd_core.storage.models import fetch_model


class RLExecutor(Protocol):
    """Engines, scorers and a learner: a Ray cluster (`actors/rl/executor.py`), or this process.

    All methods raise `LearnerLost` if the learner's process has ended, and `RewardFailed` if a reward cannot be
    computed. A lost engine is started anew, and its part is decoded again.
    """

    def rollouts(self, parts: Sequence[NumberedTable]) -> Iterator[NumberedTable]:
        """Parts of `ASKED_COLUMNS`, decoded with the weights of the last `swap` (`ROLLOUT_COLUMNS`), in any order.
        Engines in other processes begin at once."""

    def scores(self, tables: Iterable[NumberedTable]) -> Iterator[NumberedTable]:
        """The columns `SCORES` of each part, in any order."""

    def sweep(self, tables: Sequence[NumberedTable]) -> Iterator[NumberedTable]:
        """Parts of a sweep, decoded with the weights of the last `swap` and graded, in any order."""

    def update(self, answers: Sequence[ReplayedAnswer]) -> Mapping[str, float]:
        """One update of the learner; the numbers of its report."""

    def swap(self, version: int) -> None:
        """Let the engines decode with the learner's weights from now on; these weights are version `version`."""

    def save(self, folder: Folder, name: str) -> None:
        """Write the learner's state to a file of the run's folder, durably and atomically."""

    def load(self, folder: Folder, name: str | None) -> None:
        """Let the learner continue from the state in a file (`None`: from the start). A lost learner is made anew.

        Raises `ValueError` if the learner's machine does not see the folder.
        """

    def weights(self) -> dict[str, Tensor]:
        """The learner's weights, by the decoder's names."""


class LearnerLost(RuntimeError):
    """The learner's process has ended; the progress since its last checkpoint is lost."""


class LearnerState:
    """A run's learner, which the first `load` makes, and its state in files. Every worker makes the same calls.

    `fetch` maps the name or URL of a model to a local path, as `fetch_model` does.
    """

    def __init__(
        self, recipe: RLRecipe, *, workers: Workers = ALONE, fetch: Callable[[str], str] = fetch_model
    ) -> None:
        self._recipe, self._workers, self._fetch = recipe, workers, fetch
        self._sharding: Sharding | None = None if workers.size == 1 else "replicated"
        self._learner: Learner | Distiller | None = None

    @property
    def learner(self) -> Learner | Distiller:
        assert self._learner is not None, "load() comes first"
        return self._learner

    def _fresh(self) -> Learner | Distiller:
        recipe, folder = self._recipe, model_folder(self._fetch(self._recipe.model))
        model = load_model(folder, dtype=torch.float32)
        states, shrink, workers, sharding = recipe.states, recipe.shrink, self._workers, self._sharding
        if recipe.train.teacher is None:
            return Learner(
                model,
                recipe.train,
                recipe.objective,
                states=states,
                shrink=shrink,
                workers=workers,
                sharding=sharding,
            )
        has_adapter = recipe.train.lora is not None
        found = find_teacher(recipe.train.teacher, read_folder(folder), lora=has_adapter, fetch=self._fetch)
        teacher = None if found is None else load_teacher(found, dtype=torch.float32, device=workers.device)
        return Distiller(
            model, recipe.train, teacher, states=states, shrink=shrink, workers=workers, sharding=sharding
        )

    def update(self, answers: Sequence[ReplayedAnswer]) -> dict[str, float]:
        return self.learner.update(answers).point()

    def save(self, folder: Folder, name: str) -> None:
        """The first worker writes."""
        state = self.learner.state_dict()
        if self._workers.is_first:
            with folder.staged_file(name) as path:
                torch.save(state, path)

    def load(self, folder: Folder, name: str | None) -> None:
        """Make the learner anew. The first worker reads its state from a file; without a `name` the run begins."""
        if self._workers.is_first and not (folder.exists() if name is None else folder.has(name)):
            raise ValueError(
                f"{folder / (name or '')} is not on {socket.gethostname()}, where the learner runs: give --storage a "
                "URL, or a folder that all machines share"
            )
        self._learner = self._fresh()  # never the old learner: an update may have failed half-way
        if name is not None:
            state: dict[str, Any] = {}
            if self._workers.is_first:
                with folder.local_file(name) as path:
                    state = torch.load(path, weights_only=True)
            self.learner.load_state_dict(state)


class LocalRLExecutor:
    """One engine and one learner in this process. With `sleeps` the engine gives its memory back while the learner
    works. `isolated` is `grade_table`'s."""

    def __init__(
        self, recipe: RLRecipe, engine: EngineConfig, *, tensor_parallel: int = 1, sleeps: bool, isolated: bool = False
    ) -> None:
        self._recipe, self._sleeps, self._isolated = recipe, sleeps, isolated
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._learner = LearnerState(recipe, workers=Workers(0, 1, device))
        self._engine = RolloutEngine(fetch_model(recipe.model), engine, tensor_parallel=tensor_parallel)

    def rollouts(self, parts: Sequence[NumberedTable]) -> Iterator[NumberedTable]:
        for number, table in parts:
            yield number, self._engine.decode(table)

    def scores(self, tables: Iterable[NumberedTable]) -> Iterator[NumberedTable]:
        with Scorer(self._recipe.rewards, isolated=self._isolated) as scorer:
            for number, table in tables:
                yield number, scorer(table)

    def sweep(self, tables: Sequence[NumberedTable]) -> Iterator[NumberedTable]:
        for number, table in tables:
            yield number, grade_table(self._engine.sweep(table), isolated=self._isolated)

    def update(self, answers: Sequence[ReplayedAnswer]) -> Mapping[str, float]:
        if self._sleeps:
            self._engine.sleep()
        return self._learner.update(answers)

    def swap(self, version: int) -> None:
        self._engine.take(self.weights(), version)

    def save(self, folder: Folder, name: str) -> None:
        self._learner.save(folder, name)

    def load(self, folder: Folder, name: str | None) -> None:
        self._learner.load(folder, name)

    def weights(self) -> dict[str, Tensor]:
        return self._learner.learner.weights()

    def close(self) -> None:
        self._engine.close()
