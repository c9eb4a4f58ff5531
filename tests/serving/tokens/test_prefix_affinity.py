"""Which replica gets which prompt: conversations stay, adapters part, one dominating prefix spreads."""

import random
from dataclasses import replace

import pytest

from mbd_core.decoding.blocks.config import DecodingConfig
from mbd_core.decoding.blocks.request import Request
from mbd_core.serving.tokens.prefix_affinity import PrefixAffinity, leading_pages

PAGE = 4
IDLE = {"a": 0, "b": 0, "c": 0}


def request(*tokens: int, adapter: str | None = None) -> Request:
    return Request(request_id="r", prompt=tokens, max_tokens=8, decoding=DecodingConfig(block_size=4), adapter=adapter)


def pages(*tokens: int, adapter: str | None = None) -> list[bytes]:
    return leading_pages(request(*tokens, adapter=adapter), page_size=PAGE)


def test_only_whole_pages_count_and_each_covers_those_before_it() -> None:
    assert pages(1, 2, 3) == []
    assert len(pages(*range(11))) == 2
    assert pages(*range(8)) == pages(*range(11))
    first, second = pages(*range(8)), pages(9, *range(1, 8))
    assert first[1] != second[1], "equal tokens behind another page are another prefix"
    assert pages(*range(8)) != pages(*range(8), adapter="poet")


def test_tokens_that_a_lost_replica_committed_belong_to_the_prefix() -> None:
    resumed = replace(request(1, 2, 3), committed=(4, 5, 6, 7, 8))
    assert leading_pages(resumed, page_size=PAGE) == pages(1, 2, 3, 4, 5, 6, 7, 8)


def test_the_turns_of_a_conversation_find_their_replica() -> None:
    """Each turn is the one before, its answer, which nobody has told the affinity of, and a question."""
    affinity = PrefixAffinity(balance=2)
    tokens = random.Random(0)
    turns = {name: [tokens.randrange(500) for _ in range(10)] for name in range(6)}
    homes: dict[int, str] = {}
    for _ in range(4):
        for name, turn in turns.items():
            chosen = affinity.choose(pages(*turn), IDLE)
            assert homes.setdefault(name, chosen) == chosen
            affinity.note(pages(*turn), chosen)
            turn += [tokens.randrange(500) for _ in range(7)]
    assert sorted(homes.values()) == ["a", "a", "b", "b", "c", "c"], "idle replicas share the conversations"


def test_the_longest_known_prefix_decides() -> None:
    affinity = PrefixAffinity(balance=2)
    affinity.note(pages(*range(4)), "a")
    affinity.note(pages(*range(12)), "b")
    affinity.note(pages(*range(4), 90, 91, 92, 93), "c")
    assert affinity.choose(pages(*range(14)), IDLE) == "b"
    assert affinity.choose(pages(*range(4), 90, 91, 92, 93, 94), IDLE) == "c"
    assert affinity.choose(pages(*range(4), 70, 71, 72, 73), {"a": 1, "b": 2, "c": 0}) == "c", "all have seen it"


def test_a_replica_that_is_clearly_busier_is_left_for_the_least_loaded_one() -> None:
    affinity = PrefixAffinity(balance=2)
    affinity.note(pages(*range(8)), "a")
    assert affinity.choose(pages(*range(8)), {"a": 3, "b": 1, "c": 2}) == "a"
    assert affinity.choose(pages(*range(8)), {"a": 4, "b": 1, "c": 2}) == "b"


def test_one_dominating_prefix_loads_all_replicas_and_none_far_beyond_the_others() -> None:
    affinity, loads = PrefixAffinity(balance=2), dict(IDLE)
    for _ in range(60):
        chosen = affinity.choose(pages(*range(8)), loads)
        affinity.note(pages(*range(8)), chosen)
        loads[chosen] += 1
        assert max(loads.values()) - min(loads.values()) <= 3
    assert min(loads.values()) >= 18


def test_adapters_of_one_prompt_go_their_own_ways() -> None:
    affinity = PrefixAffinity(balance=2)
    affinity.note(pages(*range(8)), "a")
    affinity.note(pages(*range(8), adapter="poet"), "b")
    assert affinity.choose(pages(*range(8)), IDLE) == "a"
    assert affinity.choose(pages(*range(8), adapter="poet"), IDLE) == "b"


def test_what_is_remembered_is_bounded_and_the_oldest_goes_first() -> None:
    affinity = PrefixAffinity(balance=0, max_prefixes=6)
    prompts = [[100 * n + i for i in range(8)] for n in range(5)]
    for prompt, replica in zip(prompts, "abcab", strict=True):
        affinity.note(pages(*prompt), replica)
        assert len(affinity) <= 6
    loads = {"a": 0, "b": 0, "z": 0}
    assert affinity.choose(pages(*prompts[0]), loads) == "z", "forgotten: the replica that has seen the least"
    assert affinity.choose(pages(*prompts[4]), loads) == "b"
    for prompt in prompts:  # each replica is charged with what is remembered of it, no more
        affinity.note(pages(*prompt), "a")
    assert affinity.choose(pages(9, 9, 9, 9), {"a": 0, "b": 0}) == "b"


def test_a_replica_that_is_gone_is_forgotten() -> None:
    affinity = PrefixAffinity(balance=2)
    affinity.note(pages(*range(8)), "a")
    affinity.note(pages(*range(4)), "b")
    assert affinity.choose(pages(*range(8)), {"b": 1, "c": 0}) == "b", "the longest that is known of those there are"
    affinity.keep({"b", "c"})
    assert len(affinity) == 1
    assert affinity.choose(pages(*range(8)), {"a": 0, "b": 1, "c": 1}) == "b", "a came back with an empty cache"


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="balance=-1"):
        PrefixAffinity(balance=-1)
