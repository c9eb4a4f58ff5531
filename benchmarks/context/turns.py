"""A conversation's next turn: the last answer's tokens that are found again, and its cost beside a cold start.

The found tokens end where the next turn's prompt first differs from the answer. Every later token must be stored anew,
because its page follows other tokens.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from benchmarks.context.chat_templates import FORMS, ChatForm
from benchmarks.context.storing import long_engine, random_prompt, seconds_clock, single_token_steps
from mbd_core.checkpoint.chat import decode_text
from mbd_core.checkpoint.shape_tokenizer import SDAR_TOKENS, shape_tokenizer
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.engine import Engine
from mbd_core.models.decoder import Decoder
from mbd_core.models.shapes import SHAPES
from mbd_core.serving.api.chat_fields import TemplateFields
from mbd_core.serving.api.chat_ids import chat_ids
from mbd_core.serving.tokens.served_model import ServedModel

QUESTION, NEXT = "Tom has 3 apples and buys 4 more. How many has he?", "And if he eats two?"
ANSWERS = {
    "prose": "He buys 4 apples, so Tom has 3 + 4 = 7 apples now. The answer is 7.",
    "begins with a blank": " 3 + 4 = 7, so he has 7 apples.",
    "ends with a line": "def total(a, b):\n    return a + b\n\nprint(total(3, 4))\n",
    "with a thought": "<think>\nThree and four is seven.\n</think>\n\nTom has 7 apples.",
}
ROUND_TRIP = {
    "template": "template",
    "tokenizer": "cut as the tokenizer cuts|.0%",
    "decoder": "cut otherwise|.0%",
    "ids": "otherwise, with token_ids|.0%",
    "not_shown": "answers that the template changes",
}
TURNS = {
    "turn": "turn",
    "prompt": "prompt tokens",
    "cached": "found",
    "forwards": "forwards of the prompt",
    "seconds": "TTFT (s)|.2f",
    "cold_forwards": "cold: forwards",
    "cold_seconds": "cold: TTFT (s)|.2f",
    "cold_over_warm": "cold / warm|.1f",
}
PROMPT_LIMIT = 1 << 16


def form_tokenizer(form: ChatForm) -> PreTrainedTokenizerBase:
    """A byte-level tokenizer with merges, which keeps the form's control tokens whole. `<think>` and `</think>` are
    tokens of ordinary text."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_learned_tokenizer()),
        mask_token=SDAR_TOKENS.mask,
        eos_token=form.controls[-1],
        additional_special_tokens=list(form.controls),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = form.template
    return tokenizer


@cache
def _learned_tokenizer() -> str:
    return str(shape_tokenizer(SHAPES["tiny-sdar"]).backend_tokenizer.to_str())


def cut_otherwise(tokenizer: PreTrainedTokenizerBase, text: str, rng: random.Random) -> list[int]:
    """Tokens that spell `text`, some of them shorter than the tokenizer's. A decoder that fills positions in any order
    writes such tokens."""
    ids: list[int] = []
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        piece = decode_text(tokenizer, [token])
        if len(piece) > 1 and piece.isascii() and rng.random() < 0.3 and not piece.startswith("<"):
            at = rng.randrange(1, len(piece))
            halves = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (piece[:at], piece[at:])]
            ids += [t for half in halves for t in half]
        else:
            ids.append(token)
    assert decode_text(tokenizer, ids) == text, "a cut changes no text"
    return ids


def found_tokens(model: ServedModel, content: str, answer: Sequence[int], *, by_ids: bool) -> int:
    """The number of an answer's leading tokens that the next turn's prompt has in the same places."""
    question, follow_up = ({"role": "user", "content": text} for text in (QUESTION, NEXT))
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    if by_ids:
        turn["token_ids"] = tuple(answer)
    fields = TemplateFields()
    known = [*chat_ids(model, [question], fields), *answer]
    prompt = chat_ids(model, [question, turn, follow_up], fields)
    same = next(
        (i for i, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b), min(len(known), len(prompt))
    )
    return max(0, same - (len(known) - len(answer)))


def round_trip_rows(*, seed: int = 0) -> list[dict[str, Any]]:
    """For each template, the share of the answers' tokens that are found: as the tokenizer cuts them, cut otherwise,
    and sent back as ids."""
    rows = []
    for name, form in FORMS.items():
        tokenizer, rng = form_tokenizer(form), random.Random(seed)
        limits = SimpleNamespace(admission=SimpleNamespace(max_length=PROMPT_LIMIT))
        model = cast(ServedModel, SimpleNamespace(tokenizer=tokenizer, limits=limits, call_form=None))
        found, number, changed = {"tokenizer": 0, "decoder": 0, "ids": 0}, {"tokenizer": 0, "decoder": 0, "ids": 0}, []
        for label, text in ANSWERS.items():
            canonical = tokenizer(text, add_special_tokens=False)["input_ids"]
            other = cut_otherwise(tokenizer, text, rng)
            for kind, ids, by_ids in (
                ("tokenizer", canonical, False),
                ("decoder", other, False),
                ("ids", other, True),
            ):
                same = found_tokens(model, text, ids, by_ids=by_ids)
                found[kind] += same
                number[kind] += len(ids)
                if kind == "ids" and same < len(ids):
                    changed.append(label)
        shares = {kind: found[kind] / number[kind] for kind in found}
        rows.append({"template": name, **shares, "not_shown": ", ".join(changed) or "-"})
    return rows


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """turns of `turn_tokens`: a question, and an answer of `answer_tokens`."""

    turns: int = 10
    turn_tokens: int = 3072
    answer_tokens: int = 64


def turn_rows(model: Decoder, talk: Conversation) -> list[dict[str, Any]]:
    """A row for each turn.

    Its prompt is the conversation so far and a new question; a warm and a cold engine get it.
    """
    rows: list[dict[str, Any]] = []
    clock = seconds_clock(model.lm_head.weight.device)
    total = talk.turns * talk.turn_tokens + model.config.block_size
    warm, cold = (long_engine(model, 2 * total, max_tokens=talk.answer_tokens, clock=clock) for _ in range(2))
    text: tuple[int, ...] = ()
    for turn in range(1, talk.turns + 1):
        question = random_prompt(model.config, talk.turn_tokens - talk.answer_tokens, seed=turn)
        request = Request(
            request_id=f"turn {turn}",
            prompt=(*text, *question),
            max_tokens=talk.answer_tokens,
            decoding=replace(single_token_steps(model.config), tau_m2t=0.0),
            ignore_eos=True,
        )
        cold.forget_prefixes()
        row, answer = _served(warm, request)
        beside, same = _served(cold, request)
        assert beside["cached"] == 0 and len(same) == len(answer)
        rows.append(
            {
                "turn": turn,
                "prompt": len(request.prompt),
                **row,
                "cold_forwards": beside["forwards"],
                "cold_seconds": beside["seconds"],
                "cold_over_warm": beside["seconds"] / row["seconds"],
                "same_tokens": same == answer,
            }
        )
        text = (*request.prompt, *answer)
    return rows


def _served(engine: Engine, request: Request) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The measures of one request, and its tokens.

    Measured: the found tokens, the forwards until the whole prompt is stored, and the seconds to the first tokens.
    """
    clock = seconds_clock(engine.runner.cache.k.device)
    engine.add(request)
    sequence = engine.scheduler.find(request.request_id)
    assert sequence is not None
    start, first, forwards, output = clock(), 0.0, 0, None
    while output is None:
        forwards += not sequence.prompt_stored
        for step in engine.step():
            first = first or clock() - start
            output = step.output or output
    return {"cached": output.counts.num_cached_tokens, "forwards": forwards, "seconds": first}, output.tokens
