"""Weights in huge pages: the same values at aligned places of one piece of memory, and the same answers."""

import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

from mbd_core.checkpoint.loading import load_model
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.memory.huge_pages import ALIGNMENT, HUGE_PAGE, in_huge_pages
from mbd_core.models.decoder import Decoder


def tensors(model: Decoder) -> list[torch.Tensor]:
    return [t for t in (*model.parameters(), *model.buffers()) if t.numel()]


def answer(model: Decoder) -> tuple[int, ...]:
    decoding = DecodingConfig(block_size=4, buffer_size=3, tau_m2t=0.3)
    request = Request(request_id="a", prompt=(20, 21, 22), max_tokens=25, decoding=decoding, ignore_eos=True)
    [output] = Engine(model, EngineConfig(max_rows=2, num_pages=60)).generate([request])
    return tuple(output.tokens)


def asks_for_huge_pages(address: int) -> bool:
    """Whether the memory at an address of this process is its own, and to be in huge pages."""
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        first, last = (int(end, 16) for end in part.split()[0].split("-"))
        if first <= address < last:
            return part.split()[1] == "rw-p" and " hg" in part.rpartition("VmFlags:")[2]
    raise AssertionError("no such memory")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_values_and_answers_stay(tiny_model_dir: Path, dtype: torch.dtype) -> None:
    plain, moved = load_model(tiny_model_dir, dtype=dtype), in_huge_pages(load_model(tiny_model_dir, dtype=dtype))
    assert all(torch.equal(a, b) for a, b in zip(tensors(plain), tensors(moved), strict=True))
    places = [t.data_ptr() for t in tensors(moved)]
    assert not any(place % ALIGNMENT for place in places)
    assert max(places) - min(places) < HUGE_PAGE
    assert answer(moved) == answer(plain)
    if sys.platform == "linux" and Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert asks_for_huge_pages(min(places))


def test_tensors_on_the_same_memory_stay_on_the_same(tiny_model_dir: Path) -> None:
    model = load_model(tiny_model_dir)
    norm = model.model.norm.weight
    model.register_buffer("same", norm.data)
    in_huge_pages(model)
    norm.data.fill_(3.0)
    assert model.get_buffer("same").eq(3.0).all()


def test_other_systems_have_small_pages(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    plain, moved = load_model(tiny_model_dir), in_huge_pages(load_model(tiny_model_dir))
    assert answer(moved) == answer(plain)
