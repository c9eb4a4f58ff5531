"""An engine that sleeps gives its memory back and wakes up as it was; all requests can be ended at once."""

from pathlib import Path

import pytest
import torch

from mbd_core.checkpoint.loading import load_model
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.memory.dormant import DormantMemory
from mbd_core.engine.sequences.admission import RequestRefused

DECODING = DecodingConfig(block_size=4, buffer_size=3, tau_m2t=0.3)


@pytest.fixture
def engine(tiny_model_dir: Path) -> Engine:
    return Engine(load_model(tiny_model_dir), EngineConfig(max_rows=2, num_pages=60, batch_invariant=True))


def asked(number: int) -> Request:
    prompt = tuple(range(20, 40 + number))
    return Request(request_id=str(number), prompt=prompt, max_tokens=25, decoding=DECODING, ignore_eos=True)


def test_views_and_shared_tensors_come_again_as_they_were() -> None:
    whole, kept = torch.arange(12.0), torch.arange(8.0)
    half, other, tail = whole[6:], torch.ones(5), kept[5:]
    dormant = DormantMemory(caches=(whole, half, other), weights=(tail, kept))
    assert dormant.num_bytes == (12 + 5 + 8) * 4
    assert not any(t.untyped_storage().nbytes() for t in (whole, other, kept))
    dormant.restore()
    half += 2
    tail += 1
    assert whole.tolist() == [0.0] * 6 + [2.0] * 6 and other.tolist() == [0.0] * 5
    assert kept.tolist() == [0, 1, 2, 3, 4, 6, 7, 8]


def test_a_wake_up_without_enough_memory_holds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    lost, kept, last = torch.ones(5), torch.arange(8.0), torch.ones(3)
    dormant = DormantMemory(caches=(lost, last), weights=(kept,))
    given, zero = dormant.num_bytes, torch.Tensor.zero_

    def no_room(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == last.nbytes:
            raise torch.OutOfMemoryError("no room")
        return zero(tensor)

    monkeypatch.setattr(torch.Tensor, "zero_", no_room)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            dormant.restore()
        assert not any(t.untyped_storage().nbytes() for t in (lost, kept, last)) and dormant.num_bytes == given
    monkeypatch.undo()
    dormant.restore()
    assert kept.tolist() == [0, 1, 2, 3, 4, 5, 6, 7] and lost.tolist() == [0.0] * 5 and last.tolist() == [0.0] * 3


def test_weights_that_waited_on_the_host_decode_as_before(engine: Engine) -> None:
    """What happens on a GPU: the fused forward's joint weights are views of the same memory."""
    before = engine.generate([asked(n) for n in range(4)])
    weights = [*engine.model.parameters(), *engine.model.buffers()]
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in weights}
    dormant = DormantMemory(caches=(), weights=weights)
    assert dormant.num_bytes == sum(memory.values()) > 0
    assert not any(t.untyped_storage().nbytes() for t in weights)
    dormant.restore()
    assert [o.tokens for o in engine.generate([asked(n) for n in range(4)])] == [o.tokens for o in before]


def test_an_engine_wakes_up_as_it_was(engine: Engine) -> None:
    before = engine.generate([asked(n) for n in range(4)])
    cache = engine.runner.cache
    size = cache.k.untyped_storage().nbytes()
    assert size == cache.k.nbytes > 0
    with pytest.raises(ValueError, match="needs an engine that sleeps"):
        engine.wake_up()
    for _ in range(2):
        assert engine.sleep() == 2 * size
        assert engine.asleep and cache.k.untyped_storage().nbytes() == cache.v.untyped_storage().nbytes() == 0
        with pytest.raises(RequestRefused, match="wake it up first"):
            engine.add(asked(0))
        for refused in (engine.sleep, lambda: engine.update_weights(engine.model.state_dict().items())):
            with pytest.raises(ValueError, match="sleeps"):
                refused()
        engine.wake_up()
        assert cache.k.untyped_storage().nbytes() == size
        again = engine.generate([asked(n) for n in range(4)])
        assert [o.tokens for o in again] == [o.tokens for o in before]
        assert again[0].counts.num_cached_tokens == 0, "what was cached is gone"
    engine.check_integrity()


def test_an_engine_at_work_does_not_sleep(engine: Engine) -> None:
    engine.add(asked(0))
    engine.step()
    with pytest.raises(ValueError, match="idle engine; 1 requests"):
        engine.sleep()
    engine.abort("0")
    assert engine.sleep() > 0


@pytest.mark.parametrize("static", [False, True], ids=["packed", "static"])
def test_all_requests_end_at_once_with_what_they_have(tiny_model_dir: Path, static: bool) -> None:
    engine = Engine(load_model(tiny_model_dir), EngineConfig(max_rows=2, num_pages=60, static_shapes=static))
    whole = {o.request_id: o.tokens for o in engine.generate([asked(n) for n in range(4)])}
    given: dict[str, tuple[int, ...]] = {str(n): () for n in range(4)}
    for n in range(4):
        engine.add(asked(n))
    while not any(given.values()):
        for step in engine.step():
            given[step.request_id] += step.piece.tokens
    engine.preempt()  # what it collects is not given out yet
    last = engine.abort_all()
    for step in last:
        given[step.request_id] += step.piece.tokens
    outputs = {step.request_id: step.output for step in last if step.output is not None}
    assert outputs.keys() == whole.keys() and not engine.has_work
    for name, output in outputs.items():
        assert output is not None and output.finish_reason == "abort"
        assert output.tokens == given[name] == whole[name][: len(given[name])]
    engine.check_integrity()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.capacity
