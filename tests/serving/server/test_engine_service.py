"""One engine that serves takes over other content, or says why not."""

import asyncio
from pathlib import Path

import pytest
from adapter_folders import write_adapter
from local_server import LIMIT, run

from mbd_core.checkpoint.config import load_config
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.engine.config import EngineConfig, SwapMode
from mbd_core.serving.api.orders import AbortOrder, SleepOrder, WakeUpOrder
from mbd_core.serving.server.engine_service import EngineService
from mbd_core.serving.tokens import changing_engine
from mbd_core.serving.tokens.async_engine import EngineStream
from mbd_core.serving.tokens.endpoint_args import EndpointArgs
from mbd_core.serving.tokens.stream import Asleep


def test_an_adapter_leaves_when_its_last_request_has_ended_and_no_wait_is_for_ever(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(tmp_path / "adapter", load_config(tiny_model_dir), seed=1)
    engine = EngineConfig(max_rows=1, num_pages=64, max_adapters=1)
    service = EngineService(EndpointArgs(model=str(tiny_model_dir), name="tiny", engine=engine))
    decoding = DecodingConfig(block_size=4, buffer_size=1, tau_m2t=1.0)
    request = Request(request_id="r", prompt=(9, 9, 9), max_tokens=400, decoding=decoding, adapter="tuned")

    async def scenario() -> None:
        async with asyncio.timeout(LIMIT):
            try:
                await service.arrange(weights=None, adapters={"tuned": str(folder)})
                stream = await service.engine.open(request)
                await anext(stream)
                with monkeypatch.context() as patched:
                    patched.setattr(changing_engine, "UNLOAD_SECONDS", 0.0)
                    with pytest.raises(ValueError):
                        await service.arrange(weights=None, adapters={})
                assert service.state()["adapters"] == {"tuned": str(folder)}
                leaving = asyncio.create_task(service.arrange(weights=None, adapters={}))
                stream.close()
                await leaving
                assert service.state()["adapters"] == {}
            finally:
                await service.stop()

    asyncio.run(scenario())


def asked(name: str, max_tokens: int = 20) -> Request:
    decoding = DecodingConfig(block_size=4, buffer_size=1, tau_m2t=1.0)
    return Request(request_id=name, prompt=(9, 9, 9), max_tokens=max_tokens, decoding=decoding, ignore_eos=True)


async def outputs(*streams: EngineStream) -> list[Output]:
    """Their outputs, which agree with their steps."""

    async def one(stream: EngineStream) -> Output:
        steps = [step async for step in stream]
        output = steps[-1].output
        assert output is not None and output.tokens == tuple(t for step in steps for t in step.piece.tokens)
        return output

    return await asyncio.gather(*map(one, streams))


def test_a_service_sleeps_when_its_requests_have_ended_and_wakes_up(tiny_model_dir: Path) -> None:
    service = EngineService(
        EndpointArgs(model=str(tiny_model_dir), name="tiny", engine=EngineConfig(max_rows=1, num_pages=64))
    )

    async def scenario() -> None:
        (whole,) = await outputs(await service.engine.open(asked("a", 60)))
        streams = [await service.engine.open(asked(name, 60)) for name in ("b", "c")]
        with pytest.raises(ValueError):
            await SleepOrder(seconds=0).apply(service)
        assert not service.asleep and service.state()["ready"]
        sleeping = asyncio.create_task(SleepOrder(seconds=LIMIT).apply(service))
        assert [o.tokens for o in await outputs(*streams)] == [whole.tokens] * 2
        cache = service.loaded.engine.runner.cache
        assert await sleeping == cache.k.nbytes + cache.v.nbytes
        assert service.asleep and await SleepOrder(seconds=0).apply(service) == 0
        state = service.state()
        assert state["asleep"] and not state["ready"] and service.healthy
        with pytest.raises(Asleep):
            await service.engine.open(asked("d"))
        for _ in range(2):
            await WakeUpOrder().apply(service)
        assert service.state()["ready"]
        assert (await outputs(await service.engine.open(asked("a", 60))))[0].tokens == whole.tokens

    run(service, scenario)


def test_a_service_that_could_not_wake_up_wholly_is_woken_again(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = EngineService(
        EndpointArgs(model=str(tiny_model_dir), name="tiny", engine=EngineConfig(max_rows=1, num_pages=64))
    )
    failures = [RuntimeError("no memory for graphs")]

    def prepare(_: object) -> int:
        if failures:
            raise failures.pop()
        return 0

    async def scenario() -> None:
        await SleepOrder(seconds=LIMIT).apply(service)
        monkeypatch.setattr(type(service.loaded), "prepare", prepare)
        with pytest.raises(RuntimeError):
            await WakeUpOrder().apply(service)
        assert not service.state()["ready"]
        await WakeUpOrder().apply(service)
        assert service.state()["ready"]
        assert (await outputs(await service.engine.open(asked("a", 6))))[0].tokens

    run(service, scenario)


def test_weights_of_one_number_are_of_one_folder(tiny_model_dir: Path, tmp_path: Path) -> None:
    service = EngineService(
        EndpointArgs(model=str(tiny_model_dir), name="tiny", engine=EngineConfig(max_rows=1, num_pages=64))
    )

    async def scenario() -> None:
        for _ in range(2):  # an order may be repeated
            await service.take_weights(str(tiny_model_dir), version=3)
        with pytest.raises(ValueError, match="version 3"):
            await service.take_weights(str(tmp_path), version=3)
        assert service.weights_version == 3

    run(service, scenario)


def test_every_request_can_be_ended_with_what_it_has(tiny_model_dir: Path) -> None:
    service = EngineService(
        EndpointArgs(model=str(tiny_model_dir), name="tiny", engine=EngineConfig(max_rows=1, num_pages=64))
    )

    async def scenario() -> None:
        streams = [await service.engine.open(asked(str(n), 400)) for n in range(5)]
        first = await anext(streams[0])
        assert await AbortOrder().apply(service) == 5
        rest = [[step async for step in stream] for stream in streams]
        ended = [steps[-1].output for steps in rest]
        assert all(o is not None and o.finish_reason == "abort" for o in ended)
        given = first.piece.tokens + tuple(t for step in rest[0] for t in step.piece.tokens)
        assert ended[0] is not None and ended[0].tokens == given != ()
        assert await AbortOrder().apply(service) == 0
        assert service.engine.load.waiting == 0
        assert (await outputs(await service.engine.open(asked("a"))))[0].finish_reason == "length"

    run(service, scenario)


def test_tensors_wait_for_the_answers_that_run_and_no_answer_mixes_versions(tiny_model_dir: Path) -> None:
    """With "wait" every token of an answer is of one version, those that begin later of the new one; none is lost."""
    service = EngineService(
        EndpointArgs(model=str(tiny_model_dir), name="tiny", engine=EngineConfig(max_rows=2, num_pages=64))
    )
    same = {name: tensor.clone() for name, tensor in service.loaded.engine.model.state_dict().items()}
    other = {name: tensor * 1.5 for name, tensor in same.items()}

    async def scenario() -> None:
        before = (await outputs(await service.engine.open(asked("prefix", 40))))[0].tokens
        streams = [await service.engine.open(asked(str(n), 40)) for n in range(5)]
        begun = await anext(streams[0])
        await service.take_weights(other, version=1, mode="wait")
        assert service.state()["weights"] == {"folder": None, "version": 1}
        steps = [[step async for step in stream] for stream in streams]
        versions = [{step.weights for step in each} for each in steps]
        assert versions == [{(0, 0)}] * 2 + [{(1, 1)}] * 3 and begun.weights == (0, 0)
        ends = [each[-1].output for each in steps]
        tokens = [end.tokens for end in ends if end is not None]
        assert len(tokens) == 5 and tokens[0] == tokens[1] == before  # one prompt, greedy
        assert tokens[2] == tokens[3] == tokens[4] != before  # nothing is left of the old weights' prefixes
        await service.take_weights(same, version=2, mode="wait")
        assert (await outputs(await service.engine.open(asked("again", 40))))[0].tokens == before
        with pytest.raises(ValueError):
            await service.take_weights({"model.norm.weight": same["model.norm.weight"]}, version=3)
        with pytest.raises(ValueError, match="version 2"):
            await service.take_weights(str(tiny_model_dir), version=2)
        assert service.weights_version == 2

    run(service, scenario)


@pytest.mark.parametrize("mode", ["preempt", "wait"])
def test_requests_say_which_weights_decoded_them(tiny_model_dir: Path, mode: SwapMode) -> None:
    service = EngineService(
        EndpointArgs(model=str(tiny_model_dir), name="tiny", engine=EngineConfig(max_rows=1, num_pages=64))
    )

    async def scenario() -> None:
        running, waiting = [await service.engine.open(asked(name, 100)) for name in ("a", "b")]
        assert (await anext(running)).weights == (0, 0)
        await service.take_weights(str(tiny_model_dir), version=7, mode=mode)
        assert service.state()["weights"] == {"folder": str(tiny_model_dir), "version": 7}
        last = [[step async for step in stream][-1] for stream in (running, waiting)]
        assert [step.weights for step in last] == [(0, 7 if mode == "preempt" else 0), (7, 7)]
        await service.take_weights(str(tiny_model_dir), version=7)  # it has them
        with pytest.raises(ValueError, match="nowhere"):
            await service.take_weights(str(tiny_model_dir / "nowhere"), version=8)
        assert service.state()["weights"]["version"] == 7

    run(service, scenario)
