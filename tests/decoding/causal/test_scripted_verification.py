"""Verified blocks under scripted logits: what a verification sees of a block that another one has filled, and where an
answer ends."""

import torch

from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.decoding.blocks.sampling import Vocab
from mbd_core.decoding.blocks.verify_config import Verify
from mbd_core.decoding.causal.verified import VerifyingDecoder

MASK, EOS, VOCAB = 0, 1, 16


def decoder(prompt: tuple[int, ...], max_tokens: int, decoding: DecodingConfig) -> VerifyingDecoder:
    request = Request(request_id="a", prompt=prompt, max_tokens=max_tokens, decoding=decoding)
    return VerifyingDecoder(request, eos_token_ids=(EOS,), vocab=Vocab(MASK, VOCAB))


def forward(
    verifying: VerifyingDecoder, wanted: dict[int, int], *, other: int = 2, confident: tuple[int, ...] = ()
) -> None:
    """One forward whose logits want these tokens by position, and elsewhere `other`."""
    logits = []
    for query in verifying.plan().queries:
        logits_PV = torch.zeros(len(query.logits_at), VOCAB)
        for row, place in enumerate(query.logits_at.tolist()):
            position = place - query.gap
            logits_PV[row, wanted.get(position, other)] = 20.0 if position in confident else 9.0
        logits.append(logits_PV)
    verifying.update(logits)


def test_a_verification_sees_the_tokens_that_another_one_put() -> None:
    """Block 2 is filled by a refusal while block 1 still has masks; block 3 is judged behind that token."""
    size = 6
    decoding = DecodingConfig(
        block_size=size, buffer_size=3, tau_add=0.0, tau_m2t=1.0, tokens_per_step=2, verify=Verify()
    )
    verifying = decoder((3,) * size, 3 * size, decoding)
    forward(verifying, {}, confident=(9,))
    assert verifying.judged_positions == list(range(6, 12))
    forward(verifying, {6: 4})  # refuses position 6, and the quota fills the most confident
    forward(verifying, {})
    assert verifying.judged_positions == [7, 8, *range(12, 18)]
    forward(verifying, {17: 5})  # block 1 keeps two masks, block 2's last draft is refused
    forward(verifying, {})
    assert verifying.judged_positions == [10, 11, *range(18, 24)]
    row = verifying.plan().queries[0]
    assert row.tokens.tolist() == [4, *[2] * 10, 5, *[2] * 6]


def test_an_ending_token_in_a_verified_block_ends_the_answer() -> None:
    """The verification stores block 1 with its EOS, and accepts drafts behind it to the end of the budget."""
    decoding = DecodingConfig(block_size=4, buffer_size=2, tau_add=0.0, verify=Verify(exact=True, store="causal"))
    verifying = decoder((3,) * 4, 5, decoding)
    forward(verifying, {})
    forward(verifying, {4: 4})
    for _ in range(2):
        forward(verifying, {6: EOS})
    assert verifying.done and verifying.tokens == [4, 2, EOS]
