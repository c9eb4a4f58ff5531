"""A step whose work on the Block Buffer is compiled by torch is the eager step: its tokens, and its bits."""

import shutil
from functools import partial

import pytest
import torch

from mbd_core.checkpoint.loading import load_model
from mbd_core.checkpoint.shipped import model_folder
from mbd_core.decoding.blocks.config import T2T, DecodingConfig, EntropyBound, Soft
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.step.static_step import static_step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU"),
]


def requests(size: int) -> list[Request]:
    plain = DecodingConfig(block_size=size, buffer_size=2, tau_m2t=0.6, tau_add=0.2)
    methods = [
        plain,
        DecodingConfig(block_size=size, buffer_size=2, tau_m2t=0.6, t2t=T2T(tau=0.7, max_edits=2)),
        DecodingConfig(block_size=size, buffer_size=2, tau_m2t=0.6, soft=Soft(stop_confidence=0.8)),
        DecodingConfig(block_size=size, buffer_size=1, entropy=EntropyBound(gamma=0.5)),
    ]
    return [
        Request(
            request_id=str(n),
            prompt=tuple(range(5, 12 + 3 * n)),
            max_tokens=20 + n,
            decoding=methods[n % len(methods)],
            sampling=Sampling(temperature=0.8 if n > 5 else 0.0, seed=n),
        )
        for n in range(8)
    ]


def test_compiled_steps_decode_as_eager_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(model_folder("tiny-mbd"))

    def outputs() -> list[tuple[object, ...]]:
        engine = Engine(model, EngineConfig(max_rows=3, buffer_size=2, num_pages=64, static_shapes=True))
        return [(o.tokens, o.counts.num_forwards) for o in engine.generate(requests(model.config.block_size))]

    expected = outputs()
    monkeypatch.setattr("mbd_core.engine.step.graphs.static_step", partial(static_step, compiled=True))
    assert outputs() == expected


def test_every_kind_that_is_captured_has_the_bits_of_the_eager_step() -> None:
    """In the order of a server's start, in which torch compiles a half anew for many numbers of rows at once."""
    model = load_model(model_folder("tiny-mbd"))
    engine = Engine(model, EngineConfig(max_rows=4, buffer_size=2, num_pages=64, static_shapes=True))
    batch = requests(model.config.block_size)
    for request in batch[:4]:
        engine.add(request)
    while not engine.buffer.resident_RN.all(-1).any():  # prompts are stored first
        engine.step()
    engine.land()
    state, buffer = engine._state, engine.buffer
    kinds = dict.fromkeys(engine._kinds.to_capture(batch[0].decoding))
    assert {kind.num_rows for kind in kinds} == {1, 2, 4}
    before, num_pages = buffer.save_all(), state.tables_RP.shape[1]
    with torch.inference_mode():
        for kind in sorted(kinds, key=lambda kind: kind.num_rows, reverse=True):
            results = []
            for compiled in (True, False):
                report = static_step(state, kind, num_pages=num_pages, compiled=compiled)
                results.append([report.clone(), *buffer.save_all()])
                buffer.restore_all(before)
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), kind
