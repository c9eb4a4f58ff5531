"""In the place of a Ray cluster under the sweep's command: its stages run one after the other in this process."""

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest
import ray
import ray.data

from actors.evaluation import sweep as evaluation
from actors.evaluation import timing
from actors.evaluation.sweep import DecodeActor, EnginePool
from actors.evaluation.timing import TimingActor
from cluster import local
from cluster.topology import Topology
from mbd_core.evaluation.sweep.decoding import ModelRefused
from mbd_core.evaluation.sweep.endpoint_stage import EndpointStage
from mbd_core.evaluation.sweep.grading import grade_table
from mbd_core.evaluation.sweep.parts import Part
from mbd_core.evaluation.sweep.plan import Sweep
from mbd_core.evaluation.sweep.timing import TimedCase


class Cluster:
    """In the place of a Ray cluster: one engine, and a fault after `fails_after` parts."""

    def __init__(self) -> None:
        self.parts: list[int] = []
        self.fails_after: int | None = None
        self.cases: list[int] = []
        self.refuses_to_time = self.times_fail = False

    def plan_pool(self, sweep: Sweep, *, num_engines: int) -> EnginePool:
        return EnginePool(engine=sweep.engine, topology=Topology(processes=num_engines), cluster_cpus=2)

    def run_parts(self, parts: Sequence[Part], sweep: Sweep, pool: EnginePool, **_: Any) -> Iterator[Any]:
        actor = DecodeActor(sweep.models, pool.engine)
        for number, part in enumerate(reversed(parts)):
            if number == self.fails_after:
                raise ray.exceptions.RayError("a node is gone")
            self.parts.append(part.number)
            yield part.number, grade_table(actor.decode(part.table()))

    def time_cases(
        self, cases: Sequence[TimedCase], sweep: Sweep, pool: EnginePool, *, concurrency: int, **_: Any
    ) -> Iterator[Any]:
        actor = TimingActor(sweep.models, pool.engine, tensor_parallel=1, concurrency=concurrency)
        for case in cases:
            if self.refuses_to_time:
                raise ModelRefused("no KV page")
            self.cases.append(case.number)
            table = actor.time(case)
            if self.times_fail:
                table = pa.Table.from_pylist(
                    [{**table.to_pylist()[0], "error": "RuntimeError: broken"}], schema=table.schema
                )
            yield case.number, table

    def ask_parts(self, parts: Sequence[Part], stage: EndpointStage, **_: Any) -> Iterator[Any]:
        for part in parts:
            self.parts.append(part.number)
            yield part.number, grade_table(stage(part.table()))


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The cluster of the sweep's command from now on."""
    cluster = Cluster()
    monkeypatch.setattr(local, "connect", lambda **_: False)
    monkeypatch.setattr(evaluation, "plan_pool", cluster.plan_pool)
    monkeypatch.setattr(evaluation, "run_parts", cluster.run_parts)
    monkeypatch.setattr(evaluation, "ask_parts", cluster.ask_parts)
    monkeypatch.setattr(timing, "time_cases", cluster.time_cases)
    return cluster
