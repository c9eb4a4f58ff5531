"""Pages: what is owned, what is cached, what is forgotten first, and that a chain names its content."""

import random

import pytest

from mbd_core.engine.memory.pages import DIGEST_BYTES, PagePool, chain_root, page_hash


def chain(*pages: list[int], namespace: str = "") -> list[bytes]:
    digests, parent = [], chain_root(namespace)
    for tokens in pages:
        digests.append(parent := page_hash(parent, tokens))
    return digests


def published(pool: PagePool, digests: list[bytes]) -> list[int]:
    """Pages of a sequence that stored `digests`; it still owns them."""
    pages = pool.alloc(len(digests))
    assert pages is not None
    for page, digest in zip(pages, digests, strict=True):
        pool.publish(page, digest)
    return pages


def test_a_hash_names_its_tokens_all_before_them_and_the_namespace() -> None:
    one = chain([1, 2], [3, 4])
    assert one == chain([1, 2], [3, 4]) and all(len(d) == DIGEST_BYTES for d in one)
    others = [*chain([1, 9], [3, 4]), *chain([3, 4], [1, 2]), *chain([1, 2], [3, 4], namespace="b"), *chain([2, 1])]
    assert not set(one) & set(others)
    assert page_hash(one[0], [3, 4]) != page_hash(one[0], [3, 4 << 32])


def test_released_pages_are_found_until_they_are_needed() -> None:
    pool, digests = PagePool(5), chain([1], [2])
    pages = published(pool, digests)
    pool.release(pages, digests)
    assert (pool.num_free, pool.num_cached) == (4, 2)
    assert pool.lookup(digests) == pages
    assert pool.lookup([*digests, *chain([7])]) == pages and pool.lookup(chain([7])) == []
    pool.share(pages)
    assert (pool.num_free, pool.num_cached) == (2, 0)
    assert pool.alloc(3) is None and pool.lookup(digests) == pages, "owned pages are not for taking"
    pool.release(pages, digests)
    assert len(pool.alloc(4) or []) == 4 and pool.lookup(digests) == []


def test_an_unpublished_page_is_free_at_once() -> None:
    pool, digests = PagePool(4), chain([1], [2])
    pages = pool.alloc(3)
    assert pages is not None
    pool.publish(pages[0], digests[0])
    pool.release(pages, digests[:1])
    assert (pool.num_free, pool.num_cached) == (3, 1) and pool.lookup(digests) == pages[:1]


def test_later_pages_go_before_earlier_ones_and_unused_chains_before_used() -> None:
    pool = PagePool(7)
    old, new = chain([1], [2], [3]), chain([4], [5], [6])
    for digests in (old, new):
        pool.release(published(pool, digests), digests)

    def left() -> tuple[int, int]:
        return len(pool.lookup(old)), len(pool.lookup(new))

    assert left() == (3, 3)
    pool.lookup(old)  # from here on `new` is the one used least recently
    sizes = []
    for _ in range(6):
        pool.alloc(1)
        sizes.append((sum(d in pool._page_of for d in old), sum(d in pool._page_of for d in new)))
    assert sizes == [(3, 2), (3, 1), (3, 0), (2, 0), (1, 0), (0, 0)]
    assert left() == (0, 0)


def test_eviction_takes_the_end_of_a_chain_first() -> None:
    pool, digests = PagePool(4), chain([1], [2], [3])
    pages = published(pool, digests)
    pool.release(pages, digests)
    for kept in (2, 1, 0):
        pool.alloc(1)
        assert pool.lookup(digests) == pages[:kept]


def test_the_second_of_equal_pages_stays_unpublished() -> None:
    pool, digests = PagePool(6), chain([1], [2])
    first, second = published(pool, digests), pool.alloc(2)
    assert second is not None and not pool.publish(second[0], digests[0])
    pool.check_integrity({"a": first, "b": second})
    pool.release(second, digests)
    assert (pool.num_free, pool.num_cached) == (3, 0), "the twin of an owned page is free, not cached"
    assert pool.lookup(digests) == first


def test_a_twin_takes_the_place_of_an_evicted_page() -> None:
    """Otherwise the pages behind it would be kept, and could never be found."""
    pool, digests = PagePool(4), chain([1], [2])
    first, second = published(pool, digests[:1]), pool.alloc(2)
    assert second is not None
    pool.publish(second[0], digests[0])
    pool.publish(second[1], digests[1])
    pool.release(first, digests[:1])
    assert pool.alloc(1) == first and pool.lookup(digests) == []
    pool.release(second, digests)
    assert pool.lookup(digests) == second
    pool.check_integrity({"c": first})


def test_integrity_names_what_is_wrong() -> None:
    pool, digests = PagePool(6), chain([1], [2])
    pages = published(pool, digests)
    pool.share(pages[:1])
    pool.check_integrity({"a": pages, "b": pages[:1]})
    with pytest.raises(AssertionError, match="has 1 owners, 2 counted"):
        pool.check_integrity({"a": pages})
    with pytest.raises(AssertionError, match=f"page {pages[0]} is held by a and by a"):
        pool.check_integrity({"a": [*pages, pages[0]]})
    pool.release(pages[:1], digests[:1])
    with pytest.raises(AssertionError, match="has 2 owners, 1 counted"):
        pool.check_integrity({"a": pages, "b": pages[:1]})
    pool.release(pages, digests)
    with pytest.raises(AssertionError, match="does not own it"):
        pool.release(pages[:1])
    with pytest.raises(AssertionError, match="not published"):
        pool.share([5])
    with pytest.raises(ValueError, match="num_pages=1"):
        PagePool(1)


def test_random_owners_never_lose_or_mix_up_a_page() -> None:
    """Against a dictionary that remembers what each page was published as; ancestors outlive descendants."""
    rng, pool = random.Random(0), PagePool(14)
    owners: dict[str, tuple[list[int], list[bytes], int]] = {}
    content: dict[int, bytes] = {}
    parents: dict[bytes, bytes] = {}
    found = 0
    for number in range(4000):
        if rng.random() < 0.5 or not owners:
            digests = chain(*[[rng.randrange(2)] for _ in range(rng.randrange(1, 6))])
            parents |= zip(digests[1:], digests, strict=False)
            shared = pool.lookup(digests)
            assert [content[p] for p in shared] == digests[: len(shared)], "a page holds what its hash says"
            found += len(shared)
            pool.share(shared)
            fresh = pool.alloc(len(digests) - len(shared))
            if fresh is None:
                pool.release(shared, digests[: len(shared)])
                continue
            for page, digest in zip(fresh, digests[len(shared) :], strict=True):
                content[page] = digest
            owners[f"o{number}"] = (shared + fresh, digests, len(shared))
        else:
            name = rng.choice(list(owners))
            pages, digests, stored = owners[name]
            if rng.random() < 0.5:
                upto = rng.randrange(stored, len(pages) + 1)
                for page, digest in zip(pages[stored:upto], digests[stored:upto], strict=True):
                    pool.publish(page, digest)
                owners[name] = (pages, digests, upto)
            else:
                del owners[name]
                pool.release(pages, digests[:stored])
        pool.check_integrity({name: pages for name, (pages, _, _) in owners.items()})
        order = {pool._hash_of[page]: place for place, page in enumerate(pool._cached)}
        for digest, place in order.items():
            parent = parents.get(digest)
            if parent is None:
                continue
            assert parent in pool._page_of, "a cached page whose chain is broken can never be found"
            assert order.get(parent, len(order)) > place, "of one chain, later pages are evicted first"
    assert found > 500
