"""Executors of a batch: they decode tables, process the decoded tables, and time requests."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol

from mbd_core.batch.decoding import DecodeStage
from mbd_core.batch.decoding_model import DecodingModel
from mbd_core.batch.parts import NumberedTable
from mbd_core.batch.postprocess import Postprocess
from mbd_core.batch.timed_cases import TimedCase
from mbd_core.batch.timing import TimedStage, timing_engine
from mbd_core.engine.config import EngineConfig


class Executor(Protocol):
    """A pool of engines and of processes for the postprocessing: a Ray cluster (`actors/evaluation/sweep.py`) or this
    process.

    postprocess  the function that takes each decoded table
    engine       the configuration of each of its `num_engines` engines
    on_gpu       whether they run on GPUs
    cluster_cpus the CPUs of its cluster, `None` without one

    All methods raise `ModelRefused` for a model that cannot be loaded, and `ExecutorFailed`.
    """

    @property
    def postprocess(self) -> Postprocess: ...
    @property
    def engine(self) -> EngineConfig: ...
    @property
    def num_engines(self) -> int: ...
    @property
    def on_gpu(self) -> bool: ...
    @property
    def cluster_cpus(self) -> float | None: ...

    def decode(self, tables: Sequence[NumberedTable]) -> Iterator[NumberedTable]:
        """The planned tables, decoded and processed, in any order. A table that killed processes too often has no
        rows."""

    def process(self, tables: Iterable[NumberedTable]) -> Iterator[NumberedTable]:
        """The decoded tables, processed; each is yielded when it is ready, in any order."""

    def time(self, cases: Sequence[TimedCase], *, left_out: Collection[int]) -> Iterator[NumberedTable]:
        """The timed requests of each case, one case after the other, without the samples `left_out`."""


class ExecutorFailed(RuntimeError):
    """An executor cannot continue, for `reason`; `traceback` includes the workers' traceback."""

    def __init__(self, reason: str, traceback: str) -> None:
        super().__init__(reason)
        self.traceback = traceback


class LocalExecutor:
    """One engine in this process, and nothing beside it.

    `load` loads a model by the name in the rows.
    """

    num_engines, cluster_cpus = 1, None

    def __init__(
        self,
        load: Callable[[str, EngineConfig], DecodingModel],
        engine: EngineConfig,
        postprocess: Postprocess,
        *,
        concurrency: int,
        on_gpu: bool = False,
    ) -> None:
        self.engine, self.postprocess, self.on_gpu = engine, postprocess, on_gpu
        self._load, self._concurrency = load, concurrency

    def decode(self, tables: Sequence[NumberedTable]) -> Iterator[NumberedTable]:
        stage = DecodeStage(lambda name: self._load(name, self.engine))
        try:
            for number, table in tables:
                yield number, self.postprocess(stage(table))
        finally:
            stage.close()

    def process(self, tables: Iterable[NumberedTable]) -> Iterator[NumberedTable]:
        for number, table in tables:
            yield number, self.postprocess(table)

    def time(self, cases: Sequence[TimedCase], *, left_out: Collection[int]) -> Iterator[NumberedTable]:
        def load(name: str, buffer_size: int) -> DecodingModel:
            return self._load(name, timing_engine(self.engine, buffer_size, concurrency=self._concurrency))

        stage = TimedStage(load, concurrency=self._concurrency)
        try:
            for case in cases:
                yield case.number, stage(case, left_out=left_out)
        finally:
            stage.close()
