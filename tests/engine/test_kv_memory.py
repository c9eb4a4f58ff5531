"""KV pages from free memory: as many as fit beside the weights, never a constant."""

import pytest
from small_engines import B, build, gist, request

from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.verify_config import Verify
from mbd_core.engine import num_pages as kv_memory
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.num_pages import bytes_per_page, longest_in_pages

SIZES = EngineConfig(max_rows=3, page_size=16)


def bytes_each(model) -> int:
    return bytes_per_page(model.config, 16, model.model.norm.weight.dtype)


def test_a_cpu_gives_what_all_batch_rows_can_fill_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    monkeypatch.setattr(kv_memory, "free_host_memory", lambda: 1 << 40)
    engine = Engine(model, SIZES)
    assert engine.num_pages == 3 * longest_in_pages(model.config, SIZES, 16) + 1
    assert engine.kv_tokens == (engine.num_pages - 1) * 16
    assert len(engine.runner.cache.layers[0][0]) == engine.num_pages


def test_the_table_has_place_for_verified_drafts_after_the_longest_prompt() -> None:
    """Copies of masks reach into one page more than the buffer."""
    served = Engine(build(), EngineConfig(num_pages=100, page_size=B, buffer_size=2))
    decoding = DecodingConfig(block_size=B, buffer_size=2, verify=Verify(exact=True, store="causal"))
    prompt = tuple(range(5, 35)) * 8 + tuple(range(5, 20))
    last = request("last", 0, "multi", decoding=decoding, prompt=prompt, max_tokens=1)
    assert len(prompt) + 1 == served.admission.max_length and len(served.generate([last])[0].tokens) == 1


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_cpu_with_little_memory_gives_a_share_of_it(monkeypatch: pytest.MonkeyPatch, fraction: float) -> None:
    model = build()
    monkeypatch.setattr(kv_memory, "free_host_memory", lambda: 40 * bytes_each(model))
    engine = Engine(model, EngineConfig(max_rows=3, page_size=16, kv_memory_fraction=fraction))
    assert engine.num_pages == int(20 * fraction)
    alone = gist(Engine(model, EngineConfig(num_pages=100, page_size=16)).generate([request("a", 1, "multi")])[0])
    assert gist(engine.generate([request("a", 1, "multi")])[0]) == alone


def test_no_room_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_memory, "free_host_memory", lambda: 0)
    with pytest.raises(ValueError, match=r"raise kv_memory_fraction"):
        Engine(build(), SIZES)


@pytest.mark.parametrize("fraction", [0.0, 1.5])
def test_a_fraction_is_a_share(fraction: float) -> None:
    with pytest.raises(ValueError, match=f"kv_memory_fraction={fraction} must be"):
        EngineConfig(kv_memory_fraction=fraction)
