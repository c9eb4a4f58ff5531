# mypy: disable-error-code="import-not-found, no-untyped-def"
"""The steps between the product of q, k and v and attention as one Triton kernel: norm, rotation, KV write.

A program takes one head of one token. Query heads go to a tensor of their own, key and value heads to their place in
the cache.

Shape legend: T tokens, H query heads, K key/value heads, N = H + K, C head channels, P positions, L places of a cache.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mbd_core.ops.launch import Kernel, launch, power_of_two

tl: Any = None  # triton.language, set when a kernel is compiled


def _heads_kernel(
    qkv_ptr,
    gain_ptr,
    table_ptr,
    positions_ptr,
    places_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    ROTATED: tl.constexpr,
    NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of one token: copied if it is a value's, else normed, rotated and stored."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, BLOCK)
    inside = channel < C
    source = qkv_ptr + (token * (H + 2 * K) + head) * C
    x = tl.load(source + channel, mask=inside, other=0.0)
    place = tl.load(places_ptr + token).to(tl.int64)
    if head >= H + K:
        tl.store(v_ptr + (place * K + head - H - K) * C + channel, x, mask=inside)
        return
    turned = tl.where(channel < ROTATED, (channel + ROTATED // 2) % ROTATED, channel)
    partner = tl.load(source + turned, mask=inside, other=0.0).to(tl.float32)
    dtype = x.dtype
    x = x.to(tl.float32)
    if NORMS:
        scale = tl.rsqrt(tl.sum(x * x, 0) / C + eps)
        gain = tl.load(gain_ptr + head * C + channel, mask=inside, other=0.0).to(tl.float32)
        gain_turned = tl.load(gain_ptr + head * C + turned, mask=inside, other=0.0).to(tl.float32)
        x = (gain * (x * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        partner = (gain_turned * (partner * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    angle = table_ptr + tl.load(positions_ptr + token).to(tl.int64) * 2 * C + channel
    cos = tl.load(angle, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(angle + C, mask=inside, other=0.0).to(tl.float32)
    out = (x * cos + partner * sin).to(dtype)
    if head < H:
        tl.store(q_ptr + (token * H + head) * C + channel, out, mask=inside)
    else:
        tl.store(k_ptr + (place * K + head - H) * C + channel, out, mask=inside)


HEADS = Kernel(_heads_kernel)


def store_heads(
    qkv: Tensor,
    gain_NC: Tensor | None,
    table_P2C: Tensor,
    positions_T: Tensor,
    *,
    keys_LKC: Tensor,
    values_LKC: Tensor,
    places_T: Tensor,
    num_rotated: int,
    eps: float,
) -> Tensor:
    """The queries (T, H, C) of `qkv` (T, (H + 2 K) C); keys and values go to `places_T` of the cache.

    Queries and keys are normed over their channels with `gain_NC` (`None`: not normed), then rotated by the cosines
    and signed sines of `table_P2C` in their first `num_rotated` channels. If tokens have the same place, one of them
    remains.
    """
    tokens, (kv_heads, channels) = len(qkv), keys_LKC.shape[1:]
    heads = qkv.shape[1] // channels - 2 * kv_heads
    assert qkv.is_contiguous() and keys_LKC.is_contiguous() and values_LKC.is_contiguous()
    q_THC = qkv.new_empty(tokens, heads, channels)
    launch(
        HEADS,
        (tokens, heads + 2 * kv_heads),
        qkv,
        qkv if gain_NC is None else gain_NC,
        table_P2C,
        positions_T,
        places_T,
        q_THC,
        keys_LKC,
        values_LKC,
        eps,
        H=heads,
        K=kv_heads,
        C=channels,
        ROTATED=num_rotated,
        NORMS=gain_NC is not None,
        BLOCK=power_of_two(channels),
        num_warps=1,
    )
    return q_THC
