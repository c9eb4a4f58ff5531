"""Where pages beyond a replica's GPUs would pay: pages kept in the host's memory, and prompts stored elsewhere.

Stored pages never change, so a copy of them is as good as the computation. Whether it is faster is arithmetic: bytes
over a link beside operations of a chip. Nothing here ran on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from benchmarks.capacity.chips import LINKS
from benchmarks.capacity.counted_blocks import FillRate, counted_answer, rate_for
from benchmarks.capacity.plan import (
    BATCHES,
    MOST_QUEUED,
    Demand,
    Place,
    decode_work,
    gpu_place,
    plans,
    prompt_forwards,
)
from benchmarks.capacity.step_model import Deployment
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.fields import DATA, DECODING, Flag, Ge, Gt, configuration

LINK_SHARE = 0.85  # estimated share of a link's nominal speed that large copies reach

AGENTS: tuple[tuple[Deployment, tuple[int, ...]], ...] = (
    (Deployment(model="llada2.2-mini", chip="h100"), (32768, 65536, 122880)),
    (Deployment(model="llada2.2-mini", chip="h200"), (32768, 65536, 122880)),
    (Deployment(model="llada2.2-flash", chip="h100", tensor_parallel=4), (32768, 65536, 122880)),
    (Deployment(model="llada2.2-flash", chip="h200", tensor_parallel=2), (32768, 65536, 122880)),
    (Deployment(model="sdar-8b", chip="h100"), (30720,)),
    (Deployment(model="sdar-8b", chip="h200"), (30720,)),
)
"""Released shapes on as many GPUs as they need, and the prompts that agents send, up to each model's positions."""


@configuration(panel=DATA)
class Turns:
    """An agent's turns: their tokens, the pause between them, and how they are decoded."""

    new_tokens: Annotated[int, Ge(1)] = 2048
    """New tokens of a turn."""
    output: Annotated[int, Ge(1)] = 256
    """Tokens of an answer."""
    think: Annotated[float, Ge(0)] = 10.0
    """Seconds between an answer and the next turn."""
    slots: Annotated[int, Ge(1), Flag(panel=DECODING)] = 2
    """Slots of a sequence."""
    tpf: Annotated[float, Gt(0), Flag(panel=DECODING)] = 6.19
    """Tokens a forward."""

    def rate(self, block_size: int) -> tuple[DecodingConfig, FillRate]:
        decoding = DecodingConfig(block_size=block_size, buffer_size=self.slots)
        return decoding, rate_for(self.tpf, decoding, length=self.output)


def _prompt_seconds(place: Place, *, context: int, new_tokens: int) -> float:
    demand = Demand(context=context, found=1 - new_tokens / context)
    return sum(place.steps.forward(work) for work in prompt_forwards(place, demand))


def host_tier_rows(
    turns: Turns, *, cases: Sequence[tuple[Deployment, tuple[int, ...]]] = AGENTS
) -> Iterator[dict[str, Any]]:
    """For each shape and length: a session's pages computed anew beside a copy of them from the host's memory.

    `live` is the number of sessions between two turns, if a replica with all their pages at hand serves turns as fast
    as it can. Sessions beyond `fit` lose their pages. Then each turn computes its whole context anew, or copies it.
    The copy is counted as if nothing ran beside it. The rates hold for a batch of eight.
    """
    for deployment, lengths in cases:
        place = gpu_place(deployment)
        decoding, rate = turns.rate(place.config.block_size)
        answer = counted_answer(rate, decoding, length=turns.output)
        for context in lengths:
            demand = Demand(context=context, output=turns.output)
            step = place.steps.step([decode_work(place, answer, demand, rows=8, buffer_size=turns.slots)])
            decode = answer.forwards * step.seconds / 8
            new = _prompt_seconds(place, context=context, new_tokens=turns.new_tokens)
            stored = context - turns.new_tokens
            anew = _prompt_seconds(place, context=stored, new_tokens=stored)
            copy = stored * place.steps.cost.kv_token_bytes / (LINK_SHARE * deployment.sheet.pcie)
            live = turns.think / (decode + new)
            yield {
                "place": f"{deployment.model}, {deployment.tensor_parallel} x {deployment.sheet.name}",
                "context": context,
                "fit": place.page_tokens // context,
                "live": live,
                "anew": anew,
                "copy": copy,
                "copy_gain": anew / copy,
                "turns_anew": 1 / (decode + new + anew),
                "turns_copy": 1 / (decode + new + copy),
                "turn_gain": (decode + new + anew) / (decode + new + copy),
                "host_gb": max(0.0, live - place.page_tokens // context)
                * context
                * place.steps.cost.kv_token_bytes
                / 1e9,
            }


HOST_COLUMNS = {
    "place": "shape",
    "context": "context",
    "fit": "sessions that fit",
    "live": "live|.0f",
    "anew": "stored anew (ms)|.0f",
    "copy": "copied (ms)|.0f",
    "copy_gain": "anew / copied|.1f",
    "turns_anew": "turns/s, anew|.2f",
    "turns_copy": "turns/s, copied|.2f",
    "turn_gain": "copied / anew|.1f",
    "host_gb": "host memory, GB a GPU|.0f",
}


def pool_rows(
    turns: Turns,
    *,
    speed: float = 150.0,
    found: float = 0.9,
    max_step_seconds: float = 0.1,
    cases: Sequence[tuple[Deployment, tuple[int, ...]]] = AGENTS,
) -> Iterator[dict[str, Any]]:
    """For each shape and length: replicas that store prompts and decode, beside two pools, one for each.

    The prompt pool hands its pages to the decoding pool. In both designs answers come at `speed` tokens a second, and
    a cache holds the share `found` of each prompt. A step that decodes and stores part of a prompt takes at most
    `max_step_seconds`. The results are numbers of replicas for one request a second. Prompts fill at most
    `MOST_QUEUED` of the prompt pool's time. Only the pages of the prompt's new part are handed over. The found part
    adds no time, because both pools fetch it at once.
    """
    for deployment, lengths in cases:
        place = gpu_place(deployment)
        decoding, rate = turns.rate(place.config.block_size)
        answer = counted_answer(rate, decoding, length=turns.output)
        for context in lengths:
            demand = Demand(context=context, output=turns.output, found=found, max_step_seconds=max_step_seconds)
            row: dict[str, Any] = {
                "place": f"{deployment.model}, {deployment.tensor_parallel} x {deployment.sheet.name}",
                "context": context,
            }
            prompt = sum(place.steps.forward(work) for work in prompt_forwards(place, demand))
            together = [
                1 / p["served"] for p in plans(place, demand, decoding, rate) if p["fits"] and p["speed"] >= speed
            ]
            apart = []
            for batch in BATCHES:
                work = decode_work(place, answer, demand, rows=batch, buffer_size=turns.slots)
                seconds = answer.forwards * place.steps.step([work]).seconds
                if turns.output / seconds >= speed and batch * (context + turns.output) <= place.page_tokens:
                    apart.append(seconds / batch + prompt / MOST_QUEUED)
            new_bytes = (1 - found) * context * place.steps.cost.kv_token_bytes
            links = LINKS | {"NVLink": deployment.sheet.nvlink}
            row |= {f"over {name}": new_bytes / (LINK_SHARE * link) for name, link in links.items()}
            row |= {"prompt": prompt, "together": min(together, default=None), "apart": min(apart, default=None)}
            row["gain"] = row["together"] / row["apart"] if together and apart else None
            yield row


POOL_COLUMNS = {
    "place": "shape",
    "context": "context",
    "prompt": "new part stored (ms)|.0f",
    **{f"over {name}": f"handed over {name} (ms)|.1f" for name in (*LINKS, "NVLink")},
    "together": "replicas that do both|.3f",
    "apart": "two pools|.3f",
    "gain": "both / two pools|.2f",
}
