"""Slots of a static step that hold no block reach no expert: they would read weights that nobody needs."""

from dataclasses import replace

import pytest
from small_engines import EXPERTS, build, engine, request
from torch import Tensor

from mbd_core.models.mlp import Experts


def test_only_resident_slots_reach_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(architecture="LLaDA2MoeModelLM", moe=EXPERTS)
    served = engine(model, static_shapes=True, batch_invariant=False)
    seen: list[tuple[int, int, int]] = []
    right = Experts.forward

    def counting(self: Experts, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        dead = (ids_TK == EXPERTS.num_experts).all(1)
        assert ((ids_TK < EXPERTS.num_experts).all(1) | dead).all()
        out = right(self, x_TD, ids_TK, weights_TK)
        assert not out[dead].any()
        resident = int(served.buffer.resident_RN.sum()) * served.block_size
        seen.append((len(x_TD), int((~dead).sum()), resident))
        return out

    monkeypatch.setattr(Experts, "forward", counting)
    batch = [replace(request(f"r{i}", i, "multi"), max_tokens=20, ignore_eos=True) for i in range(3)]
    outputs = served.generate(batch)
    monkeypatch.undo()
    static = [(tokens, live) for tokens, live, resident in seen if live < tokens and live == resident]
    assert len(static) > 10, "steps with slots that hold no block"
    dynamic = engine(model, static_shapes=False, batch_invariant=False).generate(batch)
    assert [o.tokens for o in outputs] == [o.tokens for o in dynamic]
