"""LLaDA2.2's decoding: tokens that move, and what cannot be had beside it; the fixtures hold its rules."""

import pytest
import torch

from mbd_core.decoding.blocks.config import DecodingConfig, Levenshtein, decoding_config
from mbd_core.decoding.blocks.levenshtein import EditTokens, LevenshteinRun, edited_block

IDS = EditTokens(mask=9, delete=8, split=7)
CONFIG = DecodingConfig(block_size=4, tau_m2t=0.5, edit=Levenshtein(steps=4, max_post_steps=6))


def logits(tokens: list[int], strength: float = 8.0) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), 10).float() * strength


@pytest.mark.parametrize("variant", ["fluxserve", "sglang"])
def test_a_token_that_moves_keeps_its_forward_and_its_probability(variant: str) -> None:
    config = DecodingConfig(
        block_size=4,
        tau_m2t=0.5,
        edit=Levenshtein(variant=variant, max_post_steps=6),  # type: ignore[arg-type]
    )
    block = edited_block([5, 9, 9, 9], 1, config, IDS)
    block.advance(logits([0, 1, 2, 3]), 1)
    first = block.cells
    assert block.tokens == [5, 1, 2, 3] and [c.step for c in first] == [0, 1, 1, 1]
    block.advance(logits([0, 1, 7, 3], 9.0), 2)  # a mask comes before the third; the last falls out
    assert block.tokens == [5, 1, 9, 2] and block.cells[3] == first[2] and not block.cells[2].original
    block.advance(logits([0, 8, 4, 2], 9.0), 3)  # the second goes, the others move up
    assert block.tokens == [5, 4, 2, 9] and block.cells[2] == first[2] and block.cells[1].step == 3


def test_the_budget_cuts_the_last_block_and_an_eos_ends_with_its_own() -> None:
    run = LevenshteinRun([5], 5, CONFIG, IDS, vocab_size=10)
    while run.finish_reason is None:
        run.advance(logits([1, 2, 3, 4]))
    assert [cell.token for cell in run.useful] == [2, 3, 4, 1, 2] and run.finish_reason == "length"
    run = LevenshteinRun([5], 50, CONFIG, IDS, vocab_size=10, eos=(3,))
    while run.finish_reason is None:
        run.advance(logits([3, 2, 3, 4]))
    assert [cell.token for cell in run.useful] == [2] and run.finish_reason == "stop" and len(run.stored) == 4


@pytest.mark.parametrize("other", [{"buffer_size": 2}, {"tau_add": 0.5}, {"prompt_attention": "full"}])
def test_what_edit_replaces_is_refused_by_name(other: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(other))):
        DecodingConfig(block_size=4, edit=Levenshtein(), **other)


def test_the_method_of_a_request_counts_before_the_folders() -> None:
    folder = {"buffer_size": 3, "tau_m2t": 0.7}
    assert decoding_config(folder, {"edit": {}}, block_size=4) == DecodingConfig(
        block_size=4, tau_m2t=0.7, edit=Levenshtein()
    )
    assert decoding_config({"edit": {}}, {"buffer_size": 2}, block_size=4).edit is None
    assert decoding_config({"edit": {}}, {"tau_m2t": 0.3}, block_size=4).edit is not None
    with pytest.raises(ValueError, match="steps"):
        Levenshtein(variant="sglang", steps=4)
