"""The scheduler against a fake engine whose memory remembers what was written where."""

import dataclasses
import random
from collections.abc import Callable
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch

from mbd_core.decoding.blocks.canvas_config import Canvas
from mbd_core.decoding.blocks.causal_config import Causal
from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.engine.memory.pages import NULL_PAGE, HostPages, PagePool
from mbd_core.engine.schedule import scheduler as scheduler_module
from mbd_core.engine.schedule.pacing import Pace
from mbd_core.engine.schedule.scheduler import PrefillChunk, Scheduler
from mbd_core.engine.sequences.sequence import SequenceState, pages_needed

B, PAGE = 4, 8
EOS, UNFILLED = 1, 0


def decoding(**changes) -> DecodingConfig:
    return DecodingConfig(**{"block_size": B, "buffer_size": 2} | changes)


def request(name: str, prompt: int | tuple[int, ...], max_tokens: int = 8, **changes) -> Request:
    tokens = tuple(range(2, 2 + prompt)) if isinstance(prompt, int) else prompt
    return Request(request_id=name, prompt=tokens, max_tokens=max_tokens, decoding=decoding(**changes))


def scheduler(*, pages: int = 100, pool: PagePool | None = None, **changes) -> Scheduler:
    sizes = {"max_rows": 4, "block_size": B, "page_size": PAGE, "max_prefill_tokens": 16, "prefix_caching": True}
    return Scheduler(pool=pool or PagePool(pages + 1), **sizes | changes)


def generated(r: Request, position: int) -> int:
    """The model: equal prompts are continued equally."""
    return 2 + (sum(r.prompt) + position * position) % 3 if (len(r.prompt) + position) % 61 else EOS


MEMORY: WeakKeyDictionary[PagePool, "dict[tuple[int, int], object] | HostedCells"] = WeakKeyDictionary()


class HostedCells:
    """The fake engine's memory in a tensor that host pages can copy: each cell is the number of what it holds."""

    def __init__(self, num_pages: int) -> None:
        self._numbers = np.zeros((num_pages, PAGE), dtype=np.int64)
        self._contents: list[object] = [None]
        self._number_of: dict[object, int] = {}
        self.layers = [(torch.from_numpy(self._numbers), torch.zeros((num_pages, PAGE), dtype=torch.int64))]

    def __setitem__(self, cell: tuple[int, int], content: object) -> None:
        number = self._number_of.setdefault(content, len(self._contents))
        if number == len(self._contents):
            self._contents.append(content)
        self._numbers[cell] = number

    def __getitem__(self, cell: tuple[int, int]) -> object:
        return self._contents[self._numbers[cell]]


def hosted_pool(pages: int, host_pages: int) -> PagePool:
    """A pool with pages in the host's memory, whose fake engine writes into tensors."""
    cells = HostedCells(pages + 1)
    pool = PagePool(pages + 1, HostPages(cells.layers, num_pages=host_pages) if host_pages else None)
    MEMORY[pool] = cells
    return pool


class FakeEngine:
    """Commits random numbers of blocks. A written cell holds what its key would depend on: all tokens up to the end
    of its block; a block that is not final yet is written too, with what nobody else may read."""

    def __init__(self, scheduler: Scheduler, seed: int, *, paced: bool = False) -> None:
        """`paced`: most steps have a limit, another one each time."""
        self.scheduler, self.rng, self.paced = scheduler, random.Random(seed), paced
        self.num_cut = 0
        self.memory = MEMORY.setdefault(scheduler.pool, {})
        self.done: dict[str, SequenceState] = {}
        self.num_preemptions = 0
        self.num_steps = 0
        self.waited: dict[str, int] = {}

    def write(self, s: SequenceState, position: int, content: object) -> None:
        page = s.pages[position // PAGE]
        assert page != NULL_PAGE
        self.memory[page, position % PAGE] = content

    def content(self, s: SequenceState, position: int) -> object:
        if s.request.decoding.canvas is not None:
            return "canvas", s.request.request_id
        if position < s.origin:
            return "full", s.request.prompt
        stop = s.origin + ((position - s.origin) // B + 1) * B
        return s.origin, tuple(s.tokens[:stop])

    def check_stored(self, s: SequenceState) -> None:
        upto = s.committed if s.prompt_stored else s.prefilled
        for position in range(upto):
            cell = self.memory[s.pages[position // PAGE], position % PAGE]
            assert cell == self.content(s, position), f"{s.request.request_id} reads a foreign key at {position}"

    def window(self, s: SequenceState) -> int:
        if s.request.decoding.canvas is not None:
            return s.span
        return min(s.span, max(s.committed, s.prefix_length) + s.request.decoding.buffer_size * B)

    def grow(self, upto: Callable[[SequenceState], int]) -> list[SequenceState]:
        preempted = self.scheduler.grow(upto)
        self.num_preemptions += len(preempted)
        for s in preempted:
            if s.seated:
                s.saved_row, s.seated = tuple(s.tokens), False
        return preempted

    def step(self) -> None:
        self.num_steps += 1
        oldest = min((*self.scheduler.running.values(), *self.scheduler.waiting), key=lambda s: s.arrival)
        assert oldest not in self.grow(self.window), "the oldest is never preempted"
        self.scheduler.admit()
        assert self.scheduler.is_running(oldest)
        before = oldest.prefilled
        pace = self.pace() if self.paced and self.rng.random() < 0.8 else None
        chunks = self.scheduler.prefill(pace)
        self.check_budget(chunks, pace)
        name, waited = oldest.request.request_id, self.waited
        self.waited = {}
        if not oldest.prompt_stored and oldest.prefilled == before:
            self.waited = {name: waited.get(name, 0) + 1}
            assert self.waited[name] < scheduler_module.OLDEST_FIRST, "the oldest goes on in every fourth step"
        for s in self.scheduler.running.values():
            assert len(s.pages) * PAGE >= self.window(s)
        for c in chunks:
            for position in range(c.start, c.stop):
                self.write(c.sequence, position, self.content(c.sequence, position))
        decoding = [s for s in self.scheduler.running.values() if s.prompt_stored]
        for s in decoding:
            if not s.seated:
                assert s.saved_row is None or s.saved_row == tuple(s.tokens)
                s.seated = True
            for position in range(s.committed, self.window(s)):
                self.write(s, position, ("volatile", s.request.request_id))
        self.scheduler.publish_chunks(chunks)
        for s in decoding:
            self.commit(s)
        for s in self.scheduler.running.values():
            self.check_stored(s)

    def pace(self) -> Pace:
        """A block costs 1 at the beginning of a prompt, more behind it, by up to twice at 40 tokens."""
        return Pace(
            max_tokens=self.rng.choice((1, B, 3 * B, 1000)),
            seconds=self.rng.choice((0.0, 1.0, 4.0, 30.0)),
            token_seconds=1 / B,
            pair_seconds=self.rng.choice((0.0, 1 / B / 40)),
        )

    def check_budget(self, chunks: list[PrefillChunk], pace: Pace | None) -> None:
        total, spent = 0, 0.0
        for c in chunks:
            if pace is not None:
                spent += pace.cost(c.start, c.stop)
                assert c is chunks[0] or spent <= pace.seconds
                least = c is chunks[0] and (c.stop - c.start == B or c.stop <= c.sequence.origin)
                assert least or (spent <= pace.seconds and total + c.stop - c.start <= pace.max_tokens)
                more = min(c.stop + B, c.sequence.prefix_length)
                self.num_cut += more > c.stop and spent + pace.cost(c.stop, more) > pace.seconds
            whole_prompt = c.stop <= c.sequence.origin
            assert (c.start, c.stop) == (0, c.sequence.origin) if whole_prompt else (c.stop - c.start) % B == 0
            total += c.stop - c.start
            assert total <= self.scheduler.max_prefill_tokens or (whole_prompt and c is chunks[0])

    def commit(self, s: SequenceState) -> None:
        r = s.request
        if r.decoding.canvas is not None:
            for position in range(s.span):
                self.write(s, position, self.content(s, position))
            if self.rng.random() < 0.2:
                self.scheduler.extend(s, [generated(r, p) for p in range(len(r.prompt), s.end)], 0)
                self.finish(s)
            return
        stop = min(s.committed + self.rng.choice((0, 0, B, B, 2 * B)), self.window(s))
        tokens = [
            r.prompt[p] if p < len(r.prompt) else generated(r, p) if p < s.end else UNFILLED
            for p in range(s.committed, stop)
        ]
        start = s.committed
        s.tokens, kept = s.tokens + tokens[len(s.tokens) - start :], s.tokens  # as they will stand, to know the keys
        for position in range(start, stop):
            self.write(s, position, self.content(s, position))
        s.tokens = kept
        self.scheduler.commit(s, tokens)
        fresh = tokens[max(0, len(r.prompt) - start) :]
        if s.committed >= s.end or EOS in fresh:
            self.finish(s)

    def finish(self, s: SequenceState) -> None:
        self.check_stored(s)
        wanted = [*s.request.prompt, *(generated(s.request, p) for p in range(len(s.request.prompt), s.end))]
        got = s.tokens[: s.end]
        assert got == wanted[: len(got)] and (len(got) == len(wanted) or EOS in got[len(s.request.prompt) :])
        self.done[s.request.request_id] = s
        self.scheduler.release(s)


@pytest.mark.parametrize(("seed", "host_pages"), [(0, 0), pytest.param(1, 0, marks=pytest.mark.slow), (0, 3), (1, 40)])
def test_ten_thousand_operations_lose_nothing_and_everybody_finishes(seed: int, host_pages: int) -> None:
    """With pages in the host's memory too, fewer and more than the device has."""
    rng = random.Random(seed)
    s = scheduler(pool=hosted_pool(16, host_pages), max_rows=6)
    engine, known, number = FakeEngine(s, seed), set(), 0
    conversation: tuple[int, ...] = (5, 6, 7)
    for _ in range(10_000):
        action = rng.random()
        if action < 0.2:
            if engine.done and rng.random() < 0.5:
                conversation = tuple(rng.choice(list(engine.done.values())[-8:]).tokens[: rng.randrange(2, 40)])
            prompt = conversation + tuple(rng.choices((2, 3), k=rng.randrange(1, 4)))
            kind = rng.choices(({}, {"prompt_attention": "full"}, {"prefix_cache": False}), (8, 1, 1))[0]
            r = request(f"r{number}", prompt, rng.randrange(1, 60), buffer_size=rng.randrange(1, 4), **kind)
            if rng.random() < 0.1:
                r = dataclasses.replace(r, decoding=DecodingConfig(block_size=B, canvas=Canvas()))
            if pages_needed(r, block_size=B, page_size=PAGE) <= s.pool.capacity:
                s.add(r)
                known.add(r.request_id)
                number += 1
        elif action < 0.24 and (s.running or s.waiting):
            victim = rng.choice([*s.running.values(), *s.waiting])
            known.remove(victim.request.request_id)
            s.release(victim)
            assert s.find(victim.request.request_id) is None
        elif action < 0.28:
            engine.grow(lambda q: q.span)
        elif s.running or s.waiting:
            engine.step()
        s.check_integrity()
    assert engine.num_preemptions > 250 and s.pool.hits > 5000 and number > 1000
    assert s.pool.host is None or s.pool.host.num_restored > 200
    for _ in range(600):
        if s.running or s.waiting:
            engine.step()
            s.check_integrity()
    assert known == engine.done.keys(), "everybody who was not aborted has finished"
    assert s.pool.num_free == s.pool.capacity and not s.waiting


@pytest.mark.parametrize("seed", [2, 3])
def test_long_prompts_in_chunks_of_any_length_lose_nothing(seed: int) -> None:
    """Prompts of up to 60 blocks that begin alike, under limits that change with every step, with too few pages."""
    rng = random.Random(seed)
    s = scheduler(pages=40, max_rows=4, max_prefill_tokens=64)
    engine, known, number = FakeEngine(s, seed, paced=True), set(), 0
    texts = [tuple(rng.choices((2, 3, 4), k=60 * B)) for _ in range(3)]
    for _ in range(4_000):
        action = rng.random()
        if action < 0.12 and len(s.waiting) < 4:
            text = rng.choice(texts)
            if engine.done and rng.random() < 0.3:
                text = tuple(rng.choice(list(engine.done.values())[-4:]).tokens)
            prompt = text[: rng.randrange(1, len(text))] + tuple(rng.choices((2, 3), k=rng.randrange(1, 6)))
            kind = rng.choices(({}, {"prompt_attention": "full"}), (9, 1))[0]
            r = request(f"r{number}", prompt, rng.randrange(1, 60), buffer_size=rng.randrange(1, 4), **kind)
            if pages_needed(r, block_size=B, page_size=PAGE) <= s.pool.capacity:
                s.add(r)
                known.add(r.request_id)
                number += 1
        elif action < 0.13 and s.running:
            victim = rng.choice(list(s.running.values()))
            known.remove(victim.request.request_id)
            s.release(victim)
        elif action < 0.2:
            engine.grow(lambda q: q.span)
        elif s.running or s.waiting:
            engine.step()
        s.check_integrity()
    assert engine.num_preemptions > 30 and s.pool.hits > 2000 and number > 50 and engine.num_cut > 200
    while s.running or s.waiting:
        engine.step()
    s.check_integrity()
    assert known == engine.done.keys() and s.pool.num_free == s.pool.capacity


def run_to_end(s: Scheduler, *requests: Request, seed: int = 0) -> list[SequenceState]:
    engine = FakeEngine(s, seed)
    for r in requests:
        s.add(r)
    while s.running or s.waiting:
        engine.step()
    s.check_integrity()
    return [engine.done[r.request_id] for r in requests]


def test_the_second_turn_finds_the_first_answer() -> None:
    s = scheduler()
    first = run_to_end(s, request("a", 13, 22))[0]
    assert first.counted.num_cached_tokens == 0 and len(first.tokens) >= 35
    follow_up = (*first.tokens[:35], 9, 9, 9)
    second = run_to_end(s, request("b", follow_up, 4))[0]
    assert second.counted.num_cached_tokens == 32 > 13 + PAGE, (
        "whole pages: of the prompt, across its end, of the answer"
    )
    assert (s.pool.hits, s.pool.lookups) == (32, 12 + 36)
    assert second.counts().num_cached_tokens == 32


def test_positions_past_the_budget_are_not_published() -> None:
    s = scheduler()
    a = run_to_end(s, request("a", 12, 2))[0]  # its last block, and with it page 1, ends with unfilled positions
    assert a.tokens[-2:] == [UNFILLED, UNFILLED]
    assert run_to_end(s, request("b", (*a.tokens, 5), 4))[0].counted.num_cached_tokens == PAGE


def test_equal_prefixes_share_pages_and_namespaces_do_not() -> None:
    pool = PagePool(40)
    one, other = scheduler(pool=pool, namespace="one"), scheduler(pool=pool, namespace="other")
    run_to_end(one, request("a", 24))
    assert run_to_end(other, request("b", 24))[0].counted.num_cached_tokens == 0
    sequences = [one.add(request(name, 24 + n)) for n, name in enumerate("cd")]
    one.admit()
    c, d = sequences
    assert c.pages[:3] == d.pages[:3] and not set(c.pages[3:]) & set(d.pages[3:])
    assert c.prompt_stored and not one.prefill(), "a prefix that is all there is not stored again"
    one.check_integrity()
    one.release(c)
    one.check_integrity()
    assert run_to_end(scheduler(pool=PagePool(40), prefix_caching=False), request("e", 24), request("f", 24))[1]


def test_prefixes_are_found_only_once_their_forward_has_run() -> None:
    s = scheduler(max_prefill_tokens=64)
    a, b = s.add(request("a", 24)), s.add(request("b", 24))
    s.admit()
    chunks = s.prefill()
    assert [(c.sequence, c.start, c.stop) for c in chunks] == [(a, 0, 24), (b, 0, 24)]
    late = s.add(request("c", 24))
    s.admit()
    assert late.counted.num_cached_tokens == 0
    s.publish_chunks(chunks)
    assert s.add(request("d", 24)) in s.admit() and s.find("d").counted.num_cached_tokens == 24
    s.check_integrity()


@pytest.mark.parametrize("changes", [{"prompt_attention": "full"}, {"prefix_cache": False}])
def test_what_cannot_be_shared_is_not(changes: dict) -> None:
    s = scheduler()
    run_to_end(s, request("a", 24, **changes))
    assert s.pool.num_cached == 0
    run_to_end(s, request("b", 24))
    assert s.pool.num_cached > 0
    assert run_to_end(s, request("c", 24, **changes))[0].counted.num_cached_tokens == 0


def test_a_full_attention_prompt_goes_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "OLDEST_FIRST", 1)
    s = scheduler()
    a, b = s.add(request("a", 21, 9, prompt_attention="full")), s.add(request("b", 21, 9, prompt_attention="full"))
    young = s.add(request("young", 7))
    s.admit()
    assert (a.origin, a.prefix_length, a.span) == (21, 21, 33)
    assert [(c.sequence, c.start, c.stop) for c in s.prefill()] == [(a, 0, 21)], "beyond the budget, but first"
    assert [(c.sequence, c.start, c.stop) for c in s.prefill()] == [(b, 0, 21)]
    assert [(c.sequence, c.start, c.stop) for c in s.prefill()] == [(young, 0, 4)]
    s.commit(a, [5] * 8)
    a.prefilled, a.pages = 29, a.pages
    s._preempt(young), s._preempt(b), s._preempt(a)
    assert a.prefix_length == 29, "the prompt and what was committed behind it, on the prompt's own grid"
    s.admit()
    assert [(c.start, c.stop) for c in s.prefill() if c.sequence is a] == [(0, 21)]
    assert [(c.start, c.stop) for c in s.prefill() if c.sequence is a] == [(21, 29)] and a.prompt_stored


def test_a_block_beyond_the_budget_goes_whole() -> None:
    """Blocks without order inside are longer than the budget, with a pace and without: the oldest one goes alone."""
    causal = Causal(method="dlm", context="full", block_length=20)
    whole = DecodingConfig(block_size=B, causal=causal)
    pace = Pace(max_tokens=8, seconds=0.0, token_seconds=0.1, pair_seconds=0.0)
    for step_pace in (None, pace):
        s = scheduler()
        r = dataclasses.replace(request("a", 5, 60), decoding=whole, committed=(7,) * 40)
        a, b = s.add(r), s.add(dataclasses.replace(r, request_id="b"))
        s.admit()
        chunks = [[(c.sequence, c.start, c.stop) for c in s.prefill(step_pace)] for _ in range(7)]
        assert [c for step in chunks for c in step if c[0] is a] == [(a, 0, 5), (a, 5, 25), (a, 25, 45)]
        assert a.prompt_stored and b.prompt_stored
        assert all(len(step) == 1 for step in chunks if any(stop - start == 20 for _, start, stop in step))


def test_a_long_prompt_stalls_nobody() -> None:
    s = scheduler()
    short, long = s.add(request("short", 4, 60)), s.add(request("long", 100))
    s.admit()
    stops = []
    for _ in range(7):
        assert s.grow(lambda q: max(q.committed, q.prefix_length) + B) == []
        chunks = s.prefill()
        assert sum(c.stop - c.start for c in chunks) <= 16 and short.prompt_stored
        s.publish_chunks(chunks)
        s.commit(short, [3] * B)
        stops.append(long.prefilled)
    assert stops == [12, 28, 44, 60, 76, 92, 100] and long.prompt_stored


def test_short_prompts_pass_a_long_one_which_goes_on() -> None:
    """However many come: a short one is stored in the step it comes in, or in the next one; the long one gets every
    fourth step, and ends."""
    s = scheduler(max_rows=3)
    long = s.add(request("long", 160))
    s.admit()
    steps, waits = 0, []
    for number in range(60):
        short = s.add(request(f"short {number}", (5, 6, 7, *map(int, str(number)), 8, 9, 10)[:8]))
        s.admit()
        came = steps
        while not short.prompt_stored:
            s.publish_chunks(s.prefill())
            steps += 1
        waits.append(steps - came)
        s.release(short)
        if long.prompt_stored:
            break
    assert long.prompt_stored and max(waits) == 2 and sum(waits) / len(waits) < 1.5
    assert steps <= scheduler_module.OLDEST_FIRST * 160 // 16


def test_an_idle_engine_stores_the_same_prompts_in_the_same_steps_again() -> None:
    s, runs = scheduler(prefix_caching=False), []
    for _ in range(3):
        sequences = [s.add(request(name, length)) for name, length in (("long", 100), ("a", 20), ("b", 24))]
        s.admit()
        steps = []
        while not all(q.prompt_stored for q in sequences):
            steps.append([(c.sequence.request.request_id, c.start, c.stop) for c in s.prefill()])
        runs.append(steps)
        for sequence in sequences:
            s.release(sequence)
    assert runs[0] == runs[1] == runs[2]


def test_a_preempted_sequence_waits_in_front_and_finds_its_pages_again() -> None:
    s = scheduler(pages=8)
    old, young = s.add(request("old", (5,) * 8, 56)), s.add(request("young", 16, 48))
    s.admit()
    s.publish_chunks(s.prefill())
    s.publish_chunks(s.prefill())
    s.commit(young, [6] * B)
    s.commit(young, [7] * B)
    newcomer = s.add(request("newcomer", 4, 4))
    assert s.grow(lambda q: 40 if q is old else 32) == [young]
    assert list(s.waiting) == [young, newcomer] and not young.pages and young.counted.num_preemptions == 1
    assert len(old.pages) == 5 and (young.prefix_length, young.prefilled, young.committed) == (24, 0, 0)
    s.check_integrity()
    assert s.admit() == [], "the pages of its window are not there, and no younger one passes it"
    s.release(old)
    assert s.admit() == [young, newcomer]
    assert (young.prefilled, young.committed, young.counted.num_cached_tokens) == (24, 24, 0)
    assert young.tokens[16:] == [6] * B + [7] * B
    s.check_integrity()


def test_the_asking_one_gives_way_when_it_is_the_youngest() -> None:
    s = scheduler(pages=6)
    old, young = s.add(request("old", 8, 16)), s.add(request("young", (9,) * 8, 40))
    s.admit()
    pages = list(old.pages)
    assert s.grow(lambda q: 24 if q is old else 40) == [young] and old.pages[:2] == pages
    assert s.is_running(old) and not s.is_running(young)


def test_a_lone_request_always_gets_in() -> None:
    s = scheduler(pages=8)
    run_to_end(s, request("a", 30, 20))
    assert s.pool.num_cached > 0
    r = request("b", (9,) * 40, 24)
    assert pages_needed(r, block_size=B, page_size=PAGE) == s.pool.capacity
    assert run_to_end(s, r)[0].counted.num_preemptions == 0


def test_admission_leaves_a_page_to_whoever_grows() -> None:
    """Else the newcomer would be preempted for it in the next steps, its prompt stored in vain."""
    s = scheduler(pages=6)
    old, young = s.add(request("old", 8, 40)), s.add(request("young", (9,) * 24, 8))
    assert s.admit() == [old] and s.pool.num_free == len(young.request.prompt) // PAGE + 1
    s.release(old)
    assert s.admit() == [young]


def test_a_blocked_request_gets_in_once_its_prefix_is_there_to_share() -> None:
    s = scheduler(pages=10, max_prefill_tokens=64)
    a, b = s.add(request("a", 40, 8)), s.add(request("b", 40, 8))
    assert s.admit() == [a]
    s.publish_chunks(s.prefill())
    assert s.admit() == [b] and b.counted.num_cached_tokens == 40
    s.check_integrity()


def test_worst_case_counts_the_grid_of_the_prompt() -> None:
    assert pages_needed(request("a", 7, 1), block_size=B, page_size=PAGE) == 1
    assert pages_needed(request("a", 7, 1, prompt_attention="full"), block_size=B, page_size=PAGE) == 2


def test_a_page_is_hashed_once_and_a_blocked_request_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed, looked_up = [], []
    real_hash, real_lookup = scheduler_module.page_hash, PagePool.lookup
    monkeypatch.setattr(
        scheduler_module,
        "page_hash",
        lambda parent, tokens: (hashed.append(len(tokens)), real_hash(parent, tokens))[1],
    )
    monkeypatch.setattr(
        PagePool, "lookup", lambda pool, chain: (looked_up.append(len(chain)), real_lookup(pool, chain))[1]
    )
    s = scheduler(pages=8)
    a, blocked = s.add(request("a", 8, 40)), s.add(request("blocked", (9,) * 56))
    for _ in range(9):
        s.grow(lambda q: min(q.span, max(q.committed, q.prefix_length) + 8))
        s.admit()
        s.publish_chunks(s.prefill())
        s.commit(a, [3] * B)
    assert a.committed == 44 and not s.is_running(blocked)
    assert hashed == [PAGE] * (1 + 7 + 4), "a's prompt, the blocked prompt once, a's answer"
    assert looked_up == [1, 7]
