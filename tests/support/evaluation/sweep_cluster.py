"""In the place of a Ray cluster under the sweep's command: an executor in this process, with faults on demand."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

from actors.evaluation import sweep as evaluation
from cluster import local
from mbd_core.batch.decoding_model import ModelRefused
from mbd_core.batch.executor import ExecutorFailed, LocalExecutor
from mbd_core.batch.parts import NumberedTable
from mbd_core.batch.timed_cases import TimedCase
from mbd_core.evaluation.sweep.grading.part_grading import Grading
from mbd_core.evaluation.sweep.sweep import Sweep


class Cluster:
    """What the executors of a test did, and which faults they have: the first fails after `fails_after` parts."""

    def __init__(self) -> None:
        self.starts = 0
        self.parts: list[int] = []
        self.fails_after: int | None = None
        self.cases: list[int] = []
        self.refuses_to_time = self.times_fail = False

    @contextmanager
    def executor(
        self, sweep: Sweep, *, num_engines: int, concurrency: int, isolated: bool = False, **_: Any
    ) -> Iterator["FaultyExecutor"]:
        self.starts += 1
        load = evaluation.loader(sweep.models, tensor_parallel=1)
        executor = FaultyExecutor(load, sweep.engine, Grading(isolated=isolated), concurrency=concurrency)
        executor.cluster, executor.num_engines = self, num_engines
        yield executor


class FaultyExecutor(LocalExecutor):
    """An executor whose parts come in the reverse order."""

    cluster: Cluster

    def decode(self, tables: Sequence[NumberedTable]) -> Iterator[NumberedTable]:
        for number, table in enumerate(super().decode(list(reversed(tables)))):
            if number == self.cluster.fails_after:
                raise ExecutorFailed("a node is gone", "Traceback")
            self.cluster.parts.append(table[0])
            yield table

    def process(self, tables: Iterable[NumberedTable]) -> Iterator[NumberedTable]:
        for number, table in super().process(tables):
            self.cluster.parts.append(number)
            yield number, table

    def time(self, cases: Sequence[TimedCase], *, left_out: Collection[int]) -> Iterator[NumberedTable]:
        if self.cluster.refuses_to_time:
            raise ModelRefused("no KV page")
        for number, table in super().time(cases, left_out=left_out):
            self.cluster.cases.append(number)
            if self.cluster.times_fail:
                broken = [{**table.to_pylist()[0], "error": "RuntimeError: broken"}]
                table = pa.Table.from_pylist(broken, schema=table.schema)
            yield number, table


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The cluster of the sweep's command from now on."""
    cluster = Cluster()
    monkeypatch.setattr(local, "connect", lambda **_: False)
    monkeypatch.setattr(evaluation, "ray_executor", cluster.executor)
    return cluster
