"""BlockBatch on a hash model: branches that are left alone, merges, syncs, refreshes, and who wins."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_canvas_model import MASK, VOCAB, FakeModel, drive, make

from mbd_core.decoding.blocks.canvas_config import Branches, Canvas
from mbd_core.decoding.canvas.branch import Phase, ProbabilityMap, compatible, likeliest_tokens
from mbd_core.decoding.canvas.branches import BranchedCanvas
from mbd_core.decoding.canvas.lane import Lane, distinct_lengths

ALONE = Branches(block_lengths=(2, 4, 8), tau_merge=1.0, tau_sync=1000, refresh=1000)


def branched(settings: Branches, *, tau: float = 0.9, **rest: object) -> BranchedCanvas:
    decoder = make(Canvas(tau=tau, branches=settings), **rest)  # type: ignore[arg-type]
    assert isinstance(decoder, BranchedCanvas)
    return decoder


@pytest.mark.parametrize("shift", [False, True])
def test_branches_that_never_meet_are_runs_of_their_own(shift: bool) -> None:
    together = branched(ALONE, shift=shift, max_tokens=13)
    drive(together, FakeModel(5))
    for branch, stats in zip(together.branches, together.stats(), strict=True):
        alone = branched(replace(ALONE, block_lengths=(branch.block_length,)), shift=shift, max_tokens=13)
        drive(alone, FakeModel(5))
        assert branch.lane.tokens[3:].tolist() == alone.tokens
        assert stats == alone.stats()[0]
    assert together.num_forwards == max(s.num_init + s.num_block for s in together.stats())
    assert together.winner == 0 and together.tokens == together.branches[0].lane.tokens[3:].tolist()


def test_a_block_forward_packs_the_windows_and_nothing_else() -> None:
    decoder, model = branched(Branches(block_lengths=(2, 4, 8), refresh=1000)), FakeModel(1)
    packed = 0
    while not decoder.done:
        plan = decoder.plan()
        packed += plan.num_positions
        if decoder.num_forwards == 0:
            assert [(q.lane, q.start, q.stop) for q in plan.queries] == [(0, 0, 15)]
        else:
            assert all(q.stop - q.start == decoder.branches[q.lane].block_length for q in plan.queries[:-1])
            assert plan.num_positions <= 14
        assert not decoder.tokens, "no branch has won yet"
        decoder.update(model.forward(plan, decoder.length))
    assert packed == decoder.num_query_positions


def test_a_sync_copies_tokens_and_cache_from_the_leader() -> None:
    settings = Branches(block_lengths=(1, 8), tau_merge=1.0, tau_sync=2, refresh=1000)
    decoder, model = branched(settings, tau=0.4, max_tokens=24), FakeModel(4, scale=2.0)
    synced = False
    while not decoder.done:
        plan = decoder.plan()
        for source, target in plan.copies:
            if decoder.num_forwards > 1:
                synced = True
                assert np.array_equal(decoder.branches[source].lane.tokens, decoder.branches[target].lane.tokens)
                assert decoder.branches[source].num_decoded == decoder.branches[target].num_decoded
                assert np.array_equal(decoder.branches[source].lane.steps, decoder.branches[target].lane.steps)
        decoder.update(model.forward(plan, decoder.length))
        for source, target in plan.copies:
            if not any(q.lane in (source, target) for q in plan.queries):
                assert model.lanes[source] == model.lanes[target]
        counts = [b.num_decoded for b in decoder.branches]
        running = [b.num_decoded for b in decoder.branches if not b.done]
        assert not running or max(counts) - min(running) <= 2
    assert synced and decoder.stats()[0].num_copied > 0


def test_only_a_lead_over_tau_sync_overwrites() -> None:
    decoder = branched(Branches(block_lengths=(1, 8), tau_sync=3))
    small, large = decoder.branches
    small.lane.fill(torch.tensor([3]), torch.tensor([6]), torch.zeros(1, dtype=torch.float64), step=1)
    large.lane.fill(torch.tensor([4, 6]), torch.tensor([7, 7]), torch.zeros(2, dtype=torch.float64), step=1)
    small.num_decoded, large.num_decoded = 1, 4
    decoder._sync()
    assert small.lane.tokens[3] == 6 and not decoder._copies
    large.num_decoded = 5
    decoder._sync()
    assert np.array_equal(small.lane.tokens, large.lane.tokens) and decoder._copies == [(1, 0)]
    assert (small.start, small.stop, small.num_decoded, small.num_copied) == (3, 4, 5, 4)


def test_no_cache_is_copied_to_a_lane_that_is_computed_anew() -> None:
    settings = Branches(block_lengths=(1, 8), tau_merge=1.0, tau_sync=1, refresh=1)
    dropped = 0
    for seed in range(6):
        decoder, model = branched(settings, tau=0.4, max_tokens=24), FakeModel(seed, scale=2.0)
        while not decoder.done:
            plan = decoder.plan()
            fresh = {q.lane for q in plan.queries if q.stop - q.start == decoder.length}
            assert decoder.num_forwards < 2 or not fresh & {target for _, target in plan.copies}
            dropped += len(fresh) > 1 and len(decoder._copies) > len(plan.copies)
            decoder.update(model.forward(plan, decoder.length))
    assert dropped > 0


def test_an_eos_that_a_refresh_completes_ends_the_request() -> None:
    """One branch is complete up to its EOS, the other is not: the request does not wait for a block forward."""
    for eos_test, num_forwards in (("always", 2), ("block_forward", 3)):
        decoder = branched(replace(ALONE, block_lengths=(2, 4), eos_test=eos_test), eos=(9,), max_tokens=8)
        while not decoder.done:
            (shown, *_) = [q.logits_at for q in decoder.plan().queries]
            rows = torch.zeros(len(shown), VOCAB)
            if decoder.num_forwards:
                rows[shown < 5, 9] = 20.0
            logits = [rows[: len(q.logits_at)] for q in decoder.plan().queries]
            decoder.update(logits)
            if decoder.num_forwards == 1:
                decoder._phase = Phase.REFRESH
            if decoder.num_forwards == 3:
                break
        assert decoder.num_forwards == num_forwards and decoder.done == (eos_test == "always")


def test_merged_and_own_tokens_fill_every_branch() -> None:
    with_merges = 0
    for seed in range(8):
        settings = Branches(block_lengths=(2, 4, 8), tau_merge=0.3, tau_sync=1000, refresh=1000)
        decoder = branched(settings)
        drive(decoder, FakeModel(seed))
        with_merges += sum(s.num_merged for s in decoder.stats())
        filled = [s.num_merged + s.num_decoded for s in decoder.stats()]
        assert filled == [12, 12, 12]
    assert with_merges > 0


@pytest.mark.parametrize(("tau_merge", "taken"), [(0.2, 6), (0.6, MASK)])
def test_a_merge_takes_what_the_target_itself_finds_likely(tau_merge: float, taken: int) -> None:
    """Three branches by hand: the two small ones propose, the largest decides by its own probabilities."""
    decoder = branched(Branches(block_lengths=(2, 4, 8), tau_merge=tau_merge, tau_sync=1000, refresh=1000))
    small, middle, large = decoder.branches
    begin = decoder.prompt_length
    small.lane.fill(torch.tensor([begin]), torch.tensor([6]), torch.zeros(1, dtype=torch.float64), step=1)
    middle.lane.fill(torch.tensor([begin + 1]), torch.tensor([8]), torch.zeros(1, dtype=torch.float64), step=1)
    row = torch.full((1, VOCAB), -9.0)
    row[0, 6], row[0, 8] = 2.0, 2.0
    large.probabilities.replace(
        torch.tensor([0]), *likeliest_tokens(row, tau_merge)
    )  # position 1 was never seen: nothing is likely there
    large.lane.fill(torch.tensor([begin + 1]), torch.tensor([3]), torch.zeros(1, dtype=torch.float64), step=1)
    small.lane.fill(torch.tensor([begin + 1]), torch.tensor([4]), torch.zeros(1, dtype=torch.float64), step=1)
    decoder._merge()
    assert large.num_merged == 0, "they differ at another position"
    for branch in (small, large):
        branch.lane.masked[begin + 1], branch.lane.tokens[begin + 1] = True, MASK
    decoder.num_forwards = 7
    decoder._merge()
    assert large.lane.tokens[begin : begin + 2].tolist() == [taken, MASK]
    assert large.lane.steps[begin] == (7 if taken != MASK else 0), "a merged token has the step of its merge"
    assert (large.num_merged, middle.num_merged, small.num_merged) == (int(taken != MASK), 0, 0)
    assert middle.lane.tokens[begin].item() == MASK, "its own probabilities say nothing"


def test_completed_tokens_ask_for_a_refresh_of_all() -> None:
    decoder, model = branched(replace(ALONE, refresh=8), max_tokens=16), FakeModel(2)
    refreshes = 0
    while not decoder.done:
        plan = decoder.plan()
        if decoder.num_forwards and plan.queries[0].stop - plan.queries[0].start == decoder.length:
            refreshes += 1
            assert [q.lane for q in plan.queries] == [b.index for b in decoder.branches if not b.done]
            assert any(b.blocks_since_refresh * b.block_length >= 8 for b in decoder.branches)
            assert not plan.copies
            decoder.update(model.forward(plan, decoder.length))
            assert all(b.blocks_since_refresh <= 1 for b in decoder.branches if not b.done)
        else:
            decoder.update(model.forward(plan, decoder.length))
    assert refreshes == max(s.num_refresh for s in decoder.stats()) > 0


class Insistent(FakeModel):
    """Says token 9 everywhere, more surely the further right."""

    def rows(self, q):  # type: ignore[no-untyped-def]
        rows = torch.zeros(len(q.logits_at), VOCAB)
        rows[:, 9] = 4.0 + q.logits_at.float()
        return rows


def test_an_eos_in_the_first_forward_ends_it_there() -> None:
    decoder = branched(ALONE, eos=(9,))
    drive(decoder, Insistent())
    assert (decoder.tokens, decoder.num_forwards, decoder.winner) == ([9], 1, 0)


def test_the_released_eos_test_looks_only_behind_block_forwards() -> None:
    decoder = branched(replace(ALONE, eos_test="block_forward"), eos=(9,), max_tokens=16)
    drive(decoder, Insistent())
    assert decoder.num_forwards == 2 and decoder.tokens == [9]


def test_the_branch_that_is_surest_of_its_eos_wins() -> None:
    decoder = branched(ALONE, eos=(9,))
    one, two, _ = decoder.branches
    where = np.arange(3, 7)
    for branch in (one, two):
        branch.lane.fill(where, np.array([5, 9, 5, 5]), np.zeros(4), step=1)
    decoder._end_at_eos([one, two], {0: 0.4, 1: 0.6})
    assert decoder.winner == 1
    decoder._winner = None
    decoder._end_at_eos([one, two], {0: 0.6, 1: 0.6})
    assert decoder.winner == 0, "ties go to the smaller blocks"


def test_incompatible_lanes_do_not_merge() -> None:
    def lane(*tokens: int) -> Lane:
        values = np.array(tokens)
        return Lane(values, values == MASK, np.zeros(len(tokens)), np.zeros(len(tokens), dtype=np.int64))

    assert compatible(lane(5, 0, 7), lane(5, 6, 0))
    assert not compatible(lane(5, 0, 7), lane(5, 6, 8))


def test_a_branch_remembers_every_token_over_its_threshold() -> None:
    logits = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(0))
    for tau in (0.05, 0.2, 0.5, 1.0):
        likely = ProbabilityMap(20, tau)
        likely.replace(torch.arange(20), *likeliest_tokens(logits, tau))
        p = logits.softmax(-1).double()
        for token in range(VOCAB):
            got = likely.probability(torch.full((1, 20), token))[0]
            over = p[:, token] > tau
            torch.testing.assert_close(got[over], p[:, token][over], rtol=0, atol=1e-12)


def test_lengths_beyond_the_canvas_are_one() -> None:
    settings = Branches(block_lengths=(4, 8, 16, 32, 64))
    assert distinct_lengths(settings, 12) == [4, 8, 16]
    assert distinct_lengths(settings, 16) == [4, 8, 16]
    assert distinct_lengths(settings, 2) == [4]
