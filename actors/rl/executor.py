"""A run's executor on Ray: actors whose engines make rollouts, tasks that score them, and actors that learn.

The learner is no Ray Train job. Ray Train runs a function to its end and restarts all workers when one is lost; here
the driver asks for one update at a time, between other work, and chooses the state from which it continues. The
learner's actors form a process group, as Ray Train's workers do, and each has a `LearnerState`.

Weights reach the engines as one object of Ray's store, which the first learner returns. Each call of an engine names
this object and its version. An engine without this object, for example after a restart, takes the weights first. So
each part is decoded with the weights that its call names. The version is not enough for that: a learner that continues
from an older state repeats version numbers.
"""

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor, distributed

from actors.paths import NO_PATHS, JobPaths
from cluster.failures import task_sentence
from cluster.topology import Device, Topology, check_room, plan_topology
from mbd_core.batch.parts import NumberedTable
from mbd_core.engine.config import EngineConfig
from mbd_core.evaluation.sweep.grading.part_grading import grade_table
from mbd_core.multitf.states.answer import ReplayedAnswer
from mbd_core.multitf.step.workers import Workers
from mbd_core.rl.config import RLRecipe
from mbd_core.rl.executor import LearnerLost, LearnerState
from mbd_core.rl.parts import RewardFailed
from mbd_core.rl.rewards import RewardConfig, score_table
from mbd_core.rl.rollouts import RolloutEngine
from mbd_core.storage.folder import Folder

RETRIES = 3  # for a part whose engine's process was lost
LOST_SECONDS = 60.0  # time in which Ray reports a lost process


@dataclass(frozen=True)
class WeightsOrder:
    """The weights that an engine must use: their version, and a reference to their tensors."""

    version: int
    tensors: tuple[Any]  # an `ObjectRef`; inside a tuple Ray does not resolve it


class EngineActor:
    """`RolloutEngine` in an actor."""

    def __init__(
        self, model: str, engine: EngineConfig, *, tensor_parallel: int = 1, paths: JobPaths = NO_PATHS
    ) -> None:
        self._engine = RolloutEngine(paths.fetch(model), engine, tensor_parallel=tensor_parallel)
        self._taken = ""  # the id of the object whose weights the engine has

    def decode(self, number: int, table: pa.Table, weights: WeightsOrder) -> NumberedTable:
        self._take(weights)
        return number, self._engine.decode(table)

    def sweep(self, number: int, table: pa.Table, weights: WeightsOrder) -> NumberedTable:
        self._take(weights)
        return number, self._engine.sweep(table)

    def sleep(self) -> None:
        self._engine.sleep()

    def _take(self, weights: WeightsOrder) -> None:
        (tensors,) = weights.tensors
        if tensors.hex() != self._taken:
            self._engine.take(ray.get(tensors), weights.version)
            self._taken = tensors.hex()


class LearnerActor:
    """`LearnerState` in an actor: one worker of a learner."""

    def __init__(self, recipe: RLRecipe, rank: int, size: int, *, paths: JobPaths = NO_PATHS) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._recipe, self._workers, self._paths = recipe, Workers(rank, size, device), paths
        self._state: LearnerState | None = None

    def address(self) -> str:
        """The address at which the workers form their process group. Only the first worker is asked."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def join(self, address: str) -> None:
        """Join the process group, and build the learner."""
        workers = self._workers
        if workers.size > 1:
            backend = "cpu:gloo,cuda:nccl" if workers.device.type == "cuda" else "gloo"
            distributed.init_process_group(backend, init_method=address, rank=workers.rank, world_size=workers.size)
        self._state = LearnerState(self._recipe, workers=workers, fetch=self._paths.fetch)

    @property
    def state(self) -> LearnerState:
        assert self._state is not None, "join() comes first"
        return self._state

    def update(self, answers: Sequence[ReplayedAnswer]) -> dict[str, float]:
        return self.state.update(answers)

    def weights(self) -> tuple[dict[str, Tensor] | None, None]:
        """The gathered weights on the first worker, `None` on others. The second value is `None`; its reference is
        ready when the call has ended."""
        weights = self.state.learner.weights()
        return weights if self._workers.is_first else None, None

    def save(self, folder: Folder, name: str) -> None:
        self.state.save(folder, name)

    def load(self, folder: Folder, name: str | None) -> None:
        if self._workers.is_first:
            self._paths.check_shared()
        self.state.load(folder, name)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The placement of engines and learners on a cluster.

    With `shares`, an engine and a learner share a device: Ray counts half a device for each, and the engine frees its
    memory while the learner works.
    """

    engines: Topology
    learners: Topology
    shares: bool

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of the smallest process; a node that takes part has at least these."""
        return (self.engines if self.shares else self.learners).bundle

    @classmethod
    def of(
        cls,
        recipe: RLRecipe,
        *,
        engines: int,
        learners: int,
        tensor_parallel: int,
        device: Device | None,
        shares: bool,
    ) -> "Layout":
        """The layout on the connected cluster. Raises `ClusterTooSmall` if there is no room for all, and `ValueError`
        if the settings do not allow engines and learners to share devices."""
        if shares and (recipe.schedule != "sync" or tensor_parallel > 1 or engines != learners):
            raise ValueError(
                "--share puts one learner beside each engine of one rank, and lets them take turns: it needs the "
                f"schedule sync, --tensor-parallel 1, and as many --learners as --engines, not {learners} and "
                f"{engines}"
            )
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        plan = partial(plan_topology, nodes, device=device)
        if shares:
            pairs = plan(processes=engines, noun="pairs of engine and learner", spare_cpus=engines + 1)
            return cls(engines=pairs, learners=replace(pairs, gpus_per_rank=0), shares=True)
        layout = cls(
            engines=plan(processes=engines, ranks=tensor_parallel),
            learners=plan(processes=learners, noun="learners"),
            shares=False,
        )
        check_room([layout.engines, layout.learners], nodes, spare_cpus=1)
        return layout


class RayRLExecutor:
    """An executor on the connected cluster. `close()` it, or use it as a context.

    Engines on CPUs may share a machine's memory, so each engine sizes its KV pages from its part of the memory.
    `paths` say where engines and learners find the model.
    """

    def __init__(
        self,
        recipe: RLRecipe,
        engine: EngineConfig,
        layout: Layout,
        *,
        isolated: bool = False,
        paths: JobPaths = NO_PATHS,
    ) -> None:
        self._recipe, self._layout, self._isolated, self._paths = recipe, layout, isolated, paths
        engines = layout.engines
        self._group = None
        if layout.shares:
            bundle = {"CPU": 2.0, "GPU": float(engines.num_gpus)}
            self._group = placement_group([bundle] * engines.processes)
            ray.get(self._group.ready())
        if engines.num_gpus == 0:
            engine = replace(engine, kv_memory_fraction=engine.kv_memory_fraction / engines.processes)
        self._order: WeightsOrder | None = None
        self._engines = [
            ray.remote(EngineActor)
            .options(max_restarts=-1, max_task_retries=RETRIES, **self._room(engines, place))
            .remote(recipe.model, engine, tensor_parallel=engines.ranks, paths=paths)
            for place in range(engines.processes)
        ]
        self._learners: list[ActorHandle[LearnerActor]] = []

    def _room(self, topology: Topology, place: int) -> dict[str, Any]:
        """Ray's options that place one process."""
        if self._group is None:
            return {"num_cpus": topology.num_cpus, "num_gpus": topology.num_gpus}
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place)
        return {"num_cpus": 1, "num_gpus": self._layout.engines.num_gpus / 2, "scheduling_strategy": strategy}

    def __enter__(self) -> "RayRLExecutor":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the actors."""
        for actor in (*self._engines, *self._learners):
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)

    # Engines and scorers

    def rollouts(self, parts: Sequence[NumberedTable]) -> Iterator[NumberedTable]:
        return self._by_engines("decode", parts)

    def sweep(self, tables: Sequence[NumberedTable]) -> Iterator[NumberedTable]:
        grade = ray.remote(num_cpus=1)(grade_part)
        decoded = self._by_engines("sweep", tables)
        yield from _as_they_come(decoded, lambda number, table: grade.remote(number, table, isolated=self._isolated))

    def scores(self, tables: Iterable[NumberedTable]) -> Iterator[NumberedTable]:
        score, rewards = ray.remote(num_cpus=1)(score_part), self._recipe.rewards
        yield from _as_they_come(
            tables, lambda number, table: score.remote(number, table, rewards, isolated=self._isolated)
        )

    def _by_engines(self, method: str, parts: Sequence[NumberedTable]) -> Iterator[NumberedTable]:
        """Submit all parts at once, to the engines in turn.

        Returns an iterator over the results in order of arrival.
        """
        assert self._order is not None, "swap() comes first"
        waiting = [
            getattr(self._engines[place % len(self._engines)], method).remote(number, table, self._order)
            for place, (number, table) in enumerate(parts)
        ]

        def results() -> Iterator[NumberedTable]:
            left = list(waiting)
            try:
                with engine_errors():
                    while left:
                        ready, left = ray.wait(left)
                        yield from ray.get(ready)
            except LearnerLost:
                self._end_learners()
                raise

        return results()

    # The learner

    def update(self, answers: Sequence[ReplayedAnswer]) -> Mapping[str, float]:
        if self._layout.shares:
            with engine_errors():
                ray.get([engine.sleep.remote() for engine in self._engines])
        report: dict[str, float] = self._of_learners("update", ray.put(list(answers)))[0]
        return report

    def swap(self, version: int) -> None:
        self._order = WeightsOrder(version, (self._weights(),))

    def save(self, folder: Folder, name: str) -> None:
        self._of_learners("save", folder, name)

    def load(self, folder: Folder, name: str | None) -> None:
        if not self._learners:
            self._start_learners()
        self._of_learners("load", folder, name)

    def weights(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = ray.get(self._weights())
        return tensors

    def _start_learners(self) -> None:
        topology = self._layout.learners
        self._learners = [
            ray.remote(LearnerActor)
            .options(**self._room(topology, place))
            .remote(self._recipe, place, topology.processes, paths=self._paths)
            for place in range(topology.processes)
        ]
        (address,) = self._of_learners("address", only_first=True)
        self._of_learners("join", address)

    def _weights(self) -> Any:
        """A reference to the learner's weights, which stay in their node's object store."""
        pairs = [actor.weights.options(num_returns=2).remote() for actor in self._learners]
        self._finish([done for _, done in pairs])
        return pairs[0][0]

    def _of_learners(self, method: str, *arguments: Any, only_first: bool = False) -> list[Any]:
        """The results of a method on every worker, or on the first."""
        actors = self._learners[:1] if only_first else self._learners
        return self._finish([getattr(actor, method).remote(*arguments) for actor in actors])

    def _finish(self, references: Sequence[Any]) -> list[Any]:
        """The results of calls on the learner's workers. The first failure is raised without waiting for other
        workers, which may wait for the failed one. If a process was lost, all workers are killed, and `LearnerLost` is
        raised.

        When a process is lost, the other workers may fail before Ray reports the loss. So a `RuntimeError` is raised
        only after a wait for such a report.
        """
        waiting = list(references)
        try:
            with cluster_errors():
                while waiting:
                    ready, waiting = ray.wait(waiting)
                    ray.get(ready)
                return ray.get(list(references))
        except RayActorError as error:
            lost = error
        except RuntimeError:
            found = _lost_process(waiting)
            if found is None:
                raise
            lost = found
        self._end_learners()
        raise LearnerLost(f"a learner's process was lost: {task_sentence(lost)}") from lost

    def _end_learners(self) -> None:
        for actor in self._learners:
            ray.kill(actor)
        self._learners = []


def _lost_process(waiting: Sequence[Any]) -> RayActorError | None:
    """The error of a call whose process was lost. Ray may report it some time after another process has failed."""
    deadline = time.monotonic() + LOST_SECONDS
    left = list(waiting)
    while left and (seconds := deadline - time.monotonic()) > 0:
        ready, left = ray.wait(left, timeout=seconds)
        for reference in ready:
            try:
                ray.get(reference)
            except RayActorError as error:
                return error
            except RayError:
                continue
    return None


def score_part(number: int, table: pa.Table, rewards: RewardConfig, *, isolated: bool = False) -> NumberedTable:
    return number, score_table(table, rewards, isolated=isolated)


def grade_part(number: int, table: pa.Table, *, isolated: bool = False) -> NumberedTable:
    return number, grade_table(table, isolated=isolated)


def _as_they_come(tables: Iterable[NumberedTable], order: Callable[[int, pa.Table], Any]) -> Iterator[NumberedTable]:
    """Starts a task for each table and yields finished tables; tasks run while later tables are being made."""
    waiting: list[Any] = []
    for number, table in tables:
        waiting.append(order(number, table))
        ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        with cluster_errors():
            yield from ray.get(ready)
    with cluster_errors():
        for reference in waiting:
            yield ray.get(reference)


@contextmanager
def cluster_errors() -> Iterator[None]:
    """Translates failures of tasks into one sentence each: a failed reward raises `RewardFailed`, a bad setting
    `ValueError`, a lost process Ray's own error, and any other failure `RuntimeError`."""
    try:
        yield
    except RayActorError:
        raise
    except RayError as error:
        sentence = task_sentence(error)
        cause = error.cause if isinstance(error, RayTaskError) else None
        if isinstance(cause, RewardFailed | ValueError):
            raise type(cause)(sentence) from error
        raise RuntimeError(sentence) from error


@contextmanager
def engine_errors() -> Iterator[None]:
    """`cluster_errors`, a `RuntimeError` if an engine's process was lost too often, and `LearnerLost` if the weights
    were lost with the learner's machine before an engine had taken them."""
    try:
        with cluster_errors():
            yield
    except RuntimeError as error:
        task = error.__cause__
        if isinstance(task, RayTaskError) and isinstance(task.cause, ObjectLostError):
            raise LearnerLost("a learner's machine was lost, and its weights with it") from error
        raise
    except RayActorError as error:
        raise RuntimeError(
            f"an engine's process was lost {RETRIES + 1} times on one part: {task_sentence(error)}"
        ) from error
