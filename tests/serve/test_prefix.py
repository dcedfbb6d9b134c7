"""prefix.py: what is found again, what is copied, what is given back first."""

import random

import pytest

from hfaccel.cache.pool import PagePool, Sequence
from hfaccel.serve.prefix import PrefixTree

SIZE = 4


@pytest.fixture
def pool():
    return PagePool(page_tokens=SIZE, budget_pages=32)


@pytest.fixture
def tree(pool):
    return PrefixTree(pool)


def put(tree, tokens, key="base"):
    """What a request leaves behind: its full pages, and no sequence."""
    sequence = Sequence(tree.pool)
    sequence.extend(len(tokens))
    tree.insert(key, tokens, sequence)
    pages = list(sequence.pages)
    sequence.empty()
    return pages


def test_only_full_pages_are_kept(pool, tree):
    pages = put(tree, list(range(10)))
    assert len(tree) == pool.used_pages == 2
    assert tree.match("base", list(range(10)), limit=9) == (pages[:2], 8)
    put(tree, [7, 7, 7])
    assert len(tree) == 2 and len(tree.roots) == 1


@pytest.mark.parametrize("length", [3, 4, 5, 8, 12])
def test_a_prompt_that_is_all_there_leaves_a_token_to_compute(tree, length):
    """Lengths of case K6: one token short of what is asked, in the middle of a page where need be."""
    tokens = list(range(length))
    put(tree, tokens)
    pages, found = tree.match("base", tokens, limit=length - 1)
    kept = length // SIZE * SIZE
    assert found == min(kept, length - 1) and len(pages) == -(-found // SIZE)
    whole = tree.match("base", tokens, limit=length - 1, partial=False)[1]
    assert whole == min(kept, length - 1) // SIZE * SIZE


def test_the_longest_beginning_of_several_is_found(tree):
    head = list(range(8))
    first = put(tree, [*head, 20, 21, 22, 23])
    second = put(tree, [*head, 20, 21, 30, 31])
    assert len(tree) == 4  # the head once
    assert tree.match("base", [*head, 20, 21, 30, 9], limit=99) == ([*first[:2], second[2]], 11)
    assert tree.match("base", [*head, 40], limit=99) == (first[:2], 8)
    assert tree.match("base", [9, *head], limit=99) == ([], 0)
    assert tree.match("base", [0, 1, 9], limit=99) == (first[:1], 2)


def test_a_page_is_only_found_behind_the_same_tokens(tree):
    put(tree, [1, 2, 3, 4, 5, 6, 7, 8])
    assert tree.match("base", [9, 9, 9, 9, 5, 6, 7, 8], limit=99) == ([], 0)


def test_keys_share_nothing(tree):
    tokens = list(range(8))
    a, b = put(tree, tokens, ("v1", None)), put(tree, tokens, ("v1", "adapter"))
    assert not set(a) & set(b)
    assert tree.match(("v1", None), tokens, limit=8)[0] == a
    assert tree.match(("v1", "adapter"), tokens, limit=8)[0] == b
    assert tree.match(("v2", None), tokens, limit=8) == ([], 0)
    assert tree.forget(("v1", None)) == 2 and len(tree) == 2 == tree.pool.used_pages
    assert tree.match(("v1", "adapter"), tokens, limit=8)[0] == b


def test_a_sequence_copies_the_page_that_it_writes_to(pool, tree):
    tokens = list(range(8))
    pages = put(tree, tokens)
    shared, length = tree.match("base", tokens, limit=7)
    sequence = Sequence(pool)
    sequence.share(shared, length)
    assert pool.used_pages == 2 and tree.evictable == 0
    assert sequence.pages_for(1) == 1
    sequence.extend(1)
    assert sequence.pages[0] == pages[0] and sequence.pages[1] != pages[1]
    assert pool.used_pages == 3 and tree.evictable == 1
    tree.insert("base", tokens, sequence)  # its copy is known already: it reads the page that it copied
    assert sequence.pages == pages and pool.used_pages == 2 and tree.evictable == 0
    sequence.empty()
    assert pool.used_pages == 2 and tree.match("base", tokens, limit=8)[0] == pages


def test_least_recently_used_leaves_go_first(pool, tree):
    head = [0, 1, 2, 3]
    a, b, c = (put(tree, [*head, n, n, n, n]) for n in (5, 6, 7))
    other = put(tree, [9, 9, 9, 9])
    tree.match("base", [*head, 5, 5, 5, 5], limit=99)
    assert tree.evict(1) == 1
    assert tree.match("base", [*head, 6, 6, 6, 6], limit=99, partial=False)[1] == 4  # b is gone
    tree.match("base", [9, 9, 9, 9], limit=99)
    assert tree.evict(2) == 2
    assert tree.match("base", [*head, 7, 7, 7, 7], limit=99)[1] == 4
    assert tree.match("base", [9, 9, 9, 9], limit=99)[0] == other
    assert tree.evicted == 3 and pool.used_pages == len(tree) == 2
    assert tree.evict(99) == 2 and not tree.roots and pool.used_pages == 0
    assert a and b and c


def test_pages_in_use_are_not_given_back(pool, tree):
    tokens = list(range(12))
    pages = put(tree, tokens)
    sequence = Sequence(pool)
    sequence.share(pages, 8)
    assert tree.evictable == 1 and tree.evict(99) == 1
    assert tree.match("base", tokens, limit=99)[0] == pages[:2]
    tree.clear()
    assert len(tree) == 0 and pool.used_pages == 2  # the sequence still reads them
    sequence.empty()
    assert pool.used_pages == 0


def test_whoever_holds_a_page_holds_those_before_it(pool, tree):
    """Two that computed the same beginning side by side: the longer one's pages hang behind the other's."""
    first, second = Sequence(pool), Sequence(pool)
    first.extend(8), second.extend(14)
    tokens = list(range(14))
    assert tree.insert("base", tokens[:8], first) == 2
    assert tree.insert("base", tokens, second) == 1
    assert second.pages[:2] == first.pages and second.table[:2].tolist() == first.pages
    assert pool.used_pages == 4
    first.empty()
    assert tree.evictable == 0 == tree.evict(9)
    second.empty()
    assert tree.evictable == 3 == tree.evict(9) and pool.used_pages == 0


def test_random_traffic_against_a_list_of_all_prefixes(pool, tree):
    """The model of it: full pages by (key, tokens up to their end), with the pages that hold them."""
    draw = random.Random(3)
    known: dict[tuple, int] = {}
    for _ in range(600):
        key = draw.choice("ab")
        tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 14))]
        pages, length = tree.match(key, tokens, limit=len(tokens))
        full = 0
        while (key, tuple(tokens[: full + SIZE])) in known and full + SIZE <= len(tokens):
            full += SIZE
        assert pages[: full // SIZE] == [
            known[key, tuple(tokens[:end])] for end in range(SIZE, full + 1, SIZE)
        ]
        longest = max(
            (
                sum(1 for _ in _same(tokens[full:], path[full:]))
                for k, path in known
                if k == key and len(path) == full + SIZE and list(path[:full]) == tokens[:full]
            ),
            default=0,
        )
        assert length == full + longest
        need = -(-len(tokens) // SIZE)
        if pool.free_pages < need + 1:
            tree.evict(need + 1 - pool.free_pages)
            held = set(tree._nodes)
            known = {path: page for path, page in known.items() if page in held}
            pages, length = tree.match(key, tokens, limit=len(tokens))
        sequence = Sequence(pool)
        sequence.share(pages, length)
        sequence.extend(len(tokens) - length)
        tree.insert(key, tokens, sequence)
        for end in range(SIZE, len(tokens) + 1, SIZE):
            known.setdefault((key, tuple(tokens[:end])), sequence.pages[end // SIZE - 1])
        sequence.empty()
        assert set(known.values()) == set(tree._nodes) and len(known) == len(tree) == pool.used_pages
    assert tree.evicted > 20


def _same(a, b):
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x
