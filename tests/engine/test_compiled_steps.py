"""A step whose work on the Block Buffer is compiled by torch gives the tokens of the eager step."""

import shutil
from functools import partial

import pytest

from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.decoding.blocks.config import T2T, DecodingConfig, EntropyBound, Soft
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.static_step import static_step


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_steps_decode_as_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(model_folder("tiny-mbd"))
    size = model.config.block_size
    plain = DecodingConfig(block_size=size, buffer_size=2, tau_m2t=0.6, tau_add=0.2)
    methods = [
        plain,
        DecodingConfig(block_size=size, buffer_size=2, tau_m2t=0.6, t2t=T2T(tau=0.7, max_edits=2)),
        DecodingConfig(block_size=size, buffer_size=2, tau_m2t=0.6, soft=Soft(stop_confidence=0.8)),
        DecodingConfig(block_size=size, buffer_size=1, entropy=EntropyBound(gamma=0.5)),
    ]
    requests = [
        Request(
            request_id=str(n),
            prompt=tuple(range(5, 12 + 3 * n)),
            max_tokens=20 + n,
            decoding=methods[n % len(methods)],
            sampling=Sampling(temperature=0.8 if n > 5 else 0.0, seed=n),
        )
        for n in range(8)
    ]

    def outputs() -> list[tuple[object, ...]]:
        engine = Engine(model, EngineConfig(max_rows=3, buffer_size=2, num_pages=64, static_shapes=True))
        return [(o.tokens, o.counts.num_forwards) for o in engine.generate(requests)]

    expected = outputs()
    monkeypatch.setattr("mbd_core.engine.graphs.static_step", partial(static_step, compiled=True))
    assert outputs() == expected
