"""What becomes of requests under Ray Serve LLM's orders to sleep and to wake up, without a cluster."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from ray.llm._internal.serve.core.configs.llm_config import LLMConfig

from actors.serving.llm_server import DiffusionServer

LIMIT = 300
LONG = {"model": "tiny", "prompt": "Tom", "max_tokens": 80, "decoding": {"buffer_size": 1, "tau_m2t": 1.0}}


@pytest.fixture
def server(tiny_model_dir: Path) -> DiffusionServer:
    return DiffusionServer(
        LLMConfig(
            model_loading_config={"model_id": "tiny", "model_source": str(tiny_model_dir)},
            accelerator_config={"kind": "cpu"},
            engine_kwargs={"engine": {"max_rows": 1, "num_pages": 100}, "max_waiting": 4},
        )
    )


def run(server: DiffusionServer, scenario: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        try:
            async with asyncio.timeout(LIMIT):
                await scenario()
        finally:
            await server.__del__()

    asyncio.run(limited())


async def answer(server: DiffusionServer, **fields: Any) -> dict[str, Any]:
    (whole,) = [part async for part in server.completions(LONG | fields)]
    choice: dict[str, Any] = whole["choices"][0]
    return choice


async def under_way(server: DiffusionServer, number: int) -> list[asyncio.Task[dict[str, Any]]]:
    """So many requests, of which one runs and has committed something, and the others wait."""
    tasks = [asyncio.create_task(answer(server, user=str(i))) for i in range(number)]
    engine = server.service.loaded.engine
    while server.service.engine.load.waiting < number - 1 or not any(
        sequence.num_emitted for sequence in list(engine.scheduler.running.values())
    ):
        await asyncio.sleep(0.001)
    return tasks


def test_requests_end_before_the_server_sleeps_and_later_ones_are_refused(server: DiffusionServer) -> None:
    async def scenario() -> None:
        whole = await answer(server)
        tasks = await under_way(server, 3)
        order = asyncio.create_task(server.sleep())
        await asyncio.sleep(0)  # the order has come
        with pytest.raises(RuntimeError, match="the server sleeps"):
            await answer(server)
        assert not order.done() and not await server.is_sleeping()
        assert await asyncio.gather(*tasks) == [whole] * 3
        await order
        assert await server.is_sleeping()
        await server.wakeup()
        assert await answer(server) == whole

    run(server, scenario)


def test_an_order_to_abort_ends_them_with_what_they_have(server: DiffusionServer) -> None:
    async def scenario() -> None:
        whole = await answer(server)
        tasks = await under_way(server, 3)
        await server.sleep(requests="abort")
        assert await server.is_sleeping()
        first, *waited = await asyncio.gather(*tasks)
        assert first["finish_reason"] == "abort" and first["text"] and whole["text"].startswith(first["text"])
        assert [(choice["finish_reason"], choice["text"]) for choice in waited] == [("abort", "")] * 2
        await server.wakeup()
        assert await answer(server) == whole

    run(server, scenario)


def test_an_order_that_is_not_carried_out_in_time_changes_nothing(server: DiffusionServer) -> None:
    async def scenario() -> None:
        whole = await answer(server)
        tasks = await under_way(server, 2)
        with pytest.raises(ValueError, match="still run after 0 s"):
            await server.sleep(seconds=0.0)
        assert not await server.is_sleeping()
        assert await asyncio.gather(*tasks, answer(server)) == [whole] * 3

    run(server, scenario)
