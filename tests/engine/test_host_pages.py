"""Pages in the host's memory: the bits that went there come back, for requests that begin alike, and for no others."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_engines import VOCAB, B, build, engine, gist, request

from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Output, Request
from mbd_core.engine.config import EngineConfig
from mbd_core.engine.engine import Engine
from mbd_core.engine.memory.pages import STAGE_PAGES, HostPages
from mbd_core.engine.num_pages import bytes_per_page
from mbd_core.models.decoder import init_weights

PAGE_BYTES = bytes_per_page(build().config, 8, torch.float32)
FEW = {"num_pages": 24, "host_kv_bytes": 120 * PAGE_BYTES}
PROMPT = 70


def layers(num_pages: int, *, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Two layers whose heads differ."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_pages, 4, 2, 3), (num_pages, 4, 1, 5)]
    return [tuple(torch.randn(2, *shape, generator=generator)) for shape in shapes]  # type: ignore[misc]


def held(pages: list[tuple[torch.Tensor, torch.Tensor]], page: int) -> list[torch.Tensor]:
    return [tensor[page].clone() for pair in pages for tensor in pair]


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_pages_come_back_bit_for_bit_into_any_pages() -> None:
    """More of them than are gathered at once."""
    number = 2 * STAGE_PAGES + 3
    device = layers(number + 5)
    host = HostPages(device, num_pages=number)
    wanted = {digest(page): held(device, page) for page in range(number)}
    host.keep({page: digest(page) for page in range(number)})
    others = held(device, number + 4)
    for pair in device:
        for tensor in pair:
            tensor[: number + 4] = float("nan")
    targets = random.Random(0).sample(range(number + 4), number)
    host.restore({page: digest(n) for n, page in enumerate(targets)})
    for n, page in enumerate(targets):
        assert all(torch.equal(a, b) for a, b in zip(held(device, page), wanted[digest(n)], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(held(device, number + 4), others, strict=True))
    assert (host.num_kept, host.num_restored, len(host)) == (number, number, number)
    host.check_integrity()


def test_what_was_used_last_stays() -> None:
    device = layers(8)
    host = HostPages(device, num_pages=3)
    host.keep({page: digest(page) for page in range(3)})
    host.touch([digest(0), digest(1)])  # of the two, 0 counts as used last
    host.keep({3: digest(3)})
    assert digest(2) not in host and digest(0) in host and digest(1) in host
    host.keep({4: digest(4), 0: digest(0)})
    assert digest(1) not in host and digest(0) in host
    assert host.num_kept == 5, "a page that is there is not copied again"
    host.keep({page: digest(10 + page) for page in range(8)})
    assert [digest(10 + page) in host for page in range(8)] == [False] * 5 + [True] * 3
    host.restore({0: digest(17)})
    assert torch.equal(device[0][0][0], device[0][0][7])
    host.forget()
    assert not len(host) and digest(17) not in host
    host.check_integrity()


def turns(number: int, *, seed: int = 0) -> list[Request]:
    """First turns of conversations; greedy, drawn, T2T and DMax in turn."""
    rng, methods = random.Random(seed), ("single", "multi", "t2t", "soft")
    prompts = [tuple(rng.choices(range(2, VOCAB), k=PROMPT)) for _ in range(number)]
    return [
        request(str(n), n, methods[n % len(methods)], prompt=prompt, max_tokens=14, ignore_eos=True)
        for n, prompt in enumerate(prompts)
    ]


def next_turns(requests: list[Request], outputs: list[Output]) -> list[Request]:
    """All that was said, and three tokens more."""
    return [
        replace(r, prompt=(*r.prompt, *o.tokens, 5, 6, 7), request_id=f"{r.request_id}+")
        for r, o in zip(requests, outputs, strict=True)
    ]


@pytest.fixture(scope="module")
def turns_without_cache() -> list[tuple[list[Request], list[Output]]]:
    """Five conversations of three turns, each turn's requests with what an engine without a prefix cache says."""
    plain, requests, found = engine(build(), num_pages=400, prefix_caching=False), turns(5), []
    for _ in range(3):
        found.append((requests, plain.generate(requests)))
        requests = next_turns(*found[-1])
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"static_shapes": True}, marks=pytest.mark.slow),
        {"static_shapes": True, "overlap": True},
        {"host_kv_bytes": 3 * PAGE_BYTES},
    ],
    ids=["packed", "static", "launched ahead", "three pages"],
)
def test_later_turns_have_the_bits_of_turns_without_a_cache(
    changes: dict[str, Any], turns_without_cache: list[tuple[list[Request], list[Output]]]
) -> None:
    """The device cannot hold the pages of all conversations together."""
    model = build()
    config = FEW | changes
    served = engine(model, **config)
    small = engine(model, **(config | {"host_kv_bytes": 0}))
    for turn, (requests, wanted) in enumerate(turns_without_cache):
        found = served.generate(requests)
        assert [gist(o) for o in found] == [gist(o) for o in wanted]
        served.check_integrity()
        if config["host_kv_bytes"] == FEW["host_kv_bytes"]:
            without = small.generate(requests)
            cached, cached_without = (sum(o.counts.num_cached_tokens for o in outputs) for outputs in (found, without))
            if turn == 0:
                continue
            whole = sum((len(r.prompt) - 3 - B) // 8 * 8 for r in requests)
            assert cached >= whole - 8 * len(requests) > 2 * cached_without
    measures = served.measures()
    assert measures.pages_to_host > 0
    assert measures.pages_from_host > 0 or config["host_kv_bytes"] < FEW["host_kv_bytes"]
    assert 0 < measures.host_pages <= config["host_kv_bytes"] // PAGE_BYTES
    assert small.measures().host_pages == small.measures().pages_to_host == 0


def test_a_shifted_model_computes_its_last_block_again() -> None:
    """Its pages hold no hidden states, wherever they lie."""
    model = build("DreamModel", shift_logits=True, attention="full")
    plain, served = engine(model, num_pages=400, prefix_caching=False), engine(model, **FEW)
    requests = [
        replace(r, decoding=DecodingConfig(block_size=B, buffer_size=2, tau_m2t=0.4), request_id=f"s{n}")
        for n, r in enumerate(turns(7))
    ]
    for _ in range(2):
        wanted, found = plain.generate(requests), served.generate(requests)
        assert [gist(o) for o in found] == [gist(o) for o in wanted]
        requests = next_turns(requests, wanted)
    assert served.measures().pages_from_host > 0


def test_preempted_sequences_and_aborts_lose_nothing() -> None:
    model, rng = build(), random.Random(3)
    plain, served = engine(model, num_pages=400, prefix_caching=False), engine(model, **FEW)
    requests = turns(12, seed=4)
    wanted = {o.request_id: gist(o) for o in plain.generate(requests)}
    found: dict[str, Output] = {}
    for number in range(2):
        for r in requests:
            served.add(replace(r, request_id=f"{number}.{r.request_id}"))
        while served.has_work:
            if rng.random() < 0.1:
                served.preempt()
            if rng.random() < 0.02:
                served.abort(f"{number}.{rng.randrange(12)}")
            for step in served.step():
                if step.output is not None:
                    found[step.request_id] = step.output
            served.check_integrity()
    assert served.measures().pages_from_host > 0 and len(found) > 16
    for name, output in found.items():
        tokens, logprobs, reason, *_ = gist(output)
        assert (tokens, logprobs, reason) == wanted[name.partition(".")[2]][:3]


def test_other_weights_find_nothing_of_the_old_ones() -> None:
    model, other = build(), build()
    init_weights(other, seed=9, std=0.35)
    served, requests = engine(model, **FEW), turns(7)
    served.generate(requests)
    assert served.measures().host_pages > 0
    served.update_weights(list(other.state_dict().items()))
    assert served.measures().host_pages == 0
    again = [replace(r, request_id=f"n{r.request_id}") for r in requests]
    wanted = engine(other, num_pages=400, prefix_caching=False).generate(again)
    assert [gist(o) for o in served.generate(again)] == [gist(o) for o in wanted]
    served.forget_prefixes()
    assert served.measures().host_pages == 0
    served.generate([replace(r, request_id=f"f{r.request_id}") for r in requests])
    served.sleep()
    served.wake_up()
    assert served.measures().host_pages == 0
    last = [replace(r, request_id=f"w{r.request_id}") for r in requests]
    assert [gist(o)[:3] for o in served.generate(last)] == [gist(o)[:3] for o in wanted]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"host_kv_bytes": 10}, "host_kv_bytes=10 holds no page, which takes"),
        ({"host_kv_bytes": 1 << 50}, "exceeds the .* bytes of free host memory"),
        ({"host_kv_bytes": 1 << 20, "prefix_caching": False}, "cannot be honoured with prefix_caching=False"),
        ({"host_kv_bytes": -1}, "host_kv_bytes=-1 must be a whole number of at least 0"),
    ],
)
def test_what_cannot_be_had_is_said(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Engine(build(), EngineConfig(num_pages=24, page_size=8, **changes))
