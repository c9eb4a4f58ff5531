"""One engine that serves takes over other content, or says why not."""

import asyncio
from pathlib import Path

import pytest
from adapter_folders import write_adapter

from mbd_core.checkpoint.config_files import load_config
from mbd_core.decoding.decoding_config import DecodingConfig
from mbd_core.decoding.request import Request
from mbd_core.engine.engine_config import EngineConfig
from mbd_core.serving import engine_service
from mbd_core.serving.endpoint_args import EndpointArgs
from mbd_core.serving.engine_service import EngineService

LIMIT = 300  # seconds for what ends by itself, however busy the machine is


def test_an_adapter_leaves_when_its_last_request_has_ended_and_no_wait_is_for_ever(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(tmp_path / "adapter", load_config(tiny_model_dir), seed=1)
    engine = EngineConfig(max_rows=1, num_pages=64, max_adapters=1)
    service = EngineService(EndpointArgs(folder=str(tiny_model_dir), name="tiny", engine=engine))
    decoding = DecodingConfig(block_size=4, buffer_size=1, tau_m2t=1.0)
    request = Request(request_id="r", prompt=(9, 9, 9), max_tokens=400, decoding=decoding, adapter="tuned")

    async def scenario() -> None:
        async with asyncio.timeout(LIMIT):
            try:
                await service.arrange(weights=None, adapters={"tuned": folder})
                stream = await service.engine.open(request)
                await anext(stream)
                with monkeypatch.context() as patched:
                    patched.setattr(engine_service, "UNLOAD_SECONDS", 0.0)
                    with pytest.raises(ValueError, match="while 1 requests use it"):
                        await service.arrange(weights=None, adapters={})
                assert service.state()["adapters"] == {"tuned": str(folder)}
                leaving = asyncio.create_task(service.arrange(weights=None, adapters={}))
                stream.close()
                await leaving
                assert service.state()["adapters"] == {}
            finally:
                await service.stop()

    asyncio.run(scenario())
