"""A request that names no max_tokens gets a number that its method and the engine can honour; a limit of length."""

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_engines import build, engine, gist
from small_engines import request as small_request

from mbd_core.decoding.blocks.canvas_config import Branches, Canvas
from mbd_core.decoding.blocks.config import DecodingConfig, Levenshtein
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling_config import Sampling
from mbd_core.engine.sequences.admission import Admission, RequestRefused

B, PAGE = 8, 16
BLOCK_BATCH = DecodingConfig(block_size=B, canvas=Canvas(branches=Branches()))
METHODS = (
    BLOCK_BATCH,
    DecodingConfig(block_size=B, canvas=Canvas(branches=Branches(block_lengths=(2, 4, 64)))),
    DecodingConfig(block_size=B, canvas=Canvas(cfg_scale=1.0)),
    DecodingConfig(block_size=B, canvas=Canvas(accept="quota", steps=20, block_length=8)),
    DecodingConfig(block_size=B, prompt_attention="full"),
    DecodingConfig(block_size=B),
)


def admission(num_pages: int, *, max_positions: int = 4096) -> Admission:
    config = replace(build(architecture="LLaDAModelLM", attention="full").config, max_positions=4096)
    return Admission(
        config,
        max_positions=max_positions,
        block_size=B,
        buffer_size=4,
        page_size=PAGE,
        num_pages=num_pages,
        prefix_caching=True,
    )


def request(decoding: DecodingConfig, prompt_length: int, max_tokens: int) -> Request:
    return Request(request_id="a", prompt=(5,) * prompt_length, max_tokens=max_tokens, decoding=decoding)


def accepts(limits: Admission, asked: Request) -> bool:
    try:
        limits.check(asked)
    except RequestRefused:
        return False
    return True


def test_block_batch_behind_a_long_prompt_is_served_with_fewer_tokens() -> None:
    """Six lanes hold the prompt six times: the usual 256 tokens do not fit, and nobody asked for them."""
    limits, asked = admission(511), request(BLOCK_BATCH, 1200, 256)
    with pytest.raises(RequestRefused, match="need 546 KV pages"):
        limits.check(asked)
    number = limits.default_max_tokens(asked)
    assert 100 < number < 256
    assert limits.check(replace(asked, max_tokens=number))
    assert not accepts(limits, replace(asked, max_tokens=number + 1))


def test_only_logits_of_the_next_position_can_carry() -> None:
    asked, blocks = request(DecodingConfig(block_size=B, carry=True), 5, 9), {"qk_norm": False, "qkv_bias": True}
    shifted = build("Fast_dLLM_QwenForCausalLM", shift_logits=True, **blocks).config
    sizes = {"block_size": B, "buffer_size": 4, "page_size": PAGE, "num_pages": 40, "prefix_caching": True}
    sizes["max_positions"] = shifted.max_positions
    assert accepts(Admission(shifted, **sizes), asked)
    with pytest.raises(RequestRefused, match=r"carry=True .*SDARForCausalLM") as caught:
        Admission(build().config, **sizes).check(asked)
    assert caught.value.field == "decoding"


@settings(derandomize=True)
@given(st.sampled_from(METHODS), st.integers(1, 90), st.integers(1, 60), st.integers(1, 40))
def test_the_default_is_the_nearest_number_that_is_accepted(
    decoding: DecodingConfig, prompt_length: int, preferred: int, num_pages: int
) -> None:
    limits, asked = LIMITS[num_pages], request(decoding, prompt_length, preferred)
    possible = [n for n in range(1, 200) if accepts(limits, replace(asked, max_tokens=n))]
    number = limits.default_max_tokens(asked)
    if possible:
        assert number == min(possible, key=lambda n: abs(n - preferred))
    else:
        assert not accepts(limits, replace(asked, max_tokens=number))


LIMITS = {num_pages: admission(num_pages) for num_pages in range(1, 41)}


@settings(derandomize=True)
@given(st.sampled_from(METHODS), st.integers(1, 90), st.integers(1, 200), st.integers(1, 40), st.integers(2, 160))
def test_what_is_too_long_is_told_what_fits(
    decoding: DecodingConfig, prompt_length: int, max_tokens: int, num_pages: int, max_positions: int
) -> None:
    limits, asked = admission(num_pages, max_positions=max_positions), request(decoding, prompt_length, max_tokens)

    def overlong(number: int) -> str:
        """Why so many tokens are too long, "" where they are not."""
        try:
            limits.check(replace(asked, max_tokens=number))
        except RequestRefused as refused:
            assume(refused.code == "context_length_exceeded")  # a quota may have too few tokens for its steps
            return str(refused)
        return ""

    why = overlong(max_tokens)
    if not why:
        assert prompt_length + max_tokens <= limits.max_length <= max_positions
    elif fits := re.search(r"max_tokens=(\d+) fits after", why):
        assert int(fits[1]) < max_tokens and not overlong(int(fits[1]))
        assert decoding.canvas is not None or overlong(int(fits[1]) + 1)
    else:
        assert f": {limits.max_length} tokens fit in all" in why and overlong(1)


def test_an_engine_with_a_limit_of_length_decodes_what_fits_alike() -> None:
    model = build()
    asked = [small_request(str(n), n, "multi") for n in range(6)]
    longest = max(len(r.prompt) + r.max_tokens for r in asked)
    whole, limited = engine(model), engine(model, max_model_len=longest)
    assert whole.admission.max_length == 256 and limited.admission.max_length == longest
    assert [gist(o) for o in limited.generate(asked)] == [gist(o) for o in whole.generate(asked)]
    with pytest.raises(RequestRefused, match=f"exceed this server's {longest} positions"):
        limited.admission.check(replace(asked[0], max_tokens=longest))
    with pytest.raises(ValueError, match=r"max_model_len=257 .*256 positions; .*rope_scaling"):
        engine(model, max_model_len=257)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sampling": Sampling(temperature=0.7)}, "temperature"),
        ({"sampling": Sampling(logit_bias=((5, 1.0),))}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
        ({"replay": True}, "replay"),
        ({"rollout": True}, "edit"),
        ({"template": (5, None, 6, 7), "ignore_eos": True}, "edit"),
    ],
)
def test_what_moving_tokens_cannot_have_is_refused(changes: dict, named: str) -> None:
    config = replace(build().config, delete_token_id=38, split_token_id=39, block_size=B)
    sizes = {"block_size": B, "buffer_size": 1, "page_size": PAGE, "num_pages": 9, "prefix_caching": True}
    sizes["max_positions"] = config.max_positions
    limits = Admission(config, **sizes)
    asked = request(DecodingConfig(block_size=B, edit=Levenshtein()), 5, 4)
    assert limits.check(asked)
    with pytest.raises(RequestRefused, match=named):
        limits.check(replace(asked, **changes))
    limits = Admission(replace(config, delete_token_id=None, split_token_id=None), **sizes)
    with pytest.raises(RequestRefused, match="delete_token_id"):
        limits.check(asked)
