"""pool.py: who owns a page, what a write to a shared one does, and that everything comes back."""

import random

import pytest
import torch

from hfaccel.cache import pool as pages
from hfaccel.cache.pool import PagePool, Sequence
from hfaccel.errors import PatchError

GROUPS, SIZE = 2, 8


def write(pool, sequence, values):
    """Append tokens whose K is `values` and V is -values, in layer 0 and, doubled, in layer 1."""
    start = sequence.length
    sequence.extend(len(values))
    position = torch.arange(start, sequence.length)
    table = torch.from_numpy(sequence.table).long()
    slots = table[position // pool.page_tokens] * pool.page_tokens + position % pool.page_tokens
    k = torch.tensor(values, dtype=torch.float32)[:, None, None].expand(-1, GROUPS, SIZE)
    for layer in (0, 1):
        pool.layer(layer, k, k).write(k * (layer + 1), -k * (layer + 1), slots)


def read(pool, sequence):
    position = torch.arange(sequence.length)
    table = torch.from_numpy(sequence.table).long()
    slots = table[position // pool.page_tokens] * pool.page_tokens + position % pool.page_tokens
    (k, v), (k1, _) = (pool.layers[layer].read(slots, torch.float32) for layer in (0, 1))
    assert torch.equal(k, -v) and torch.equal(k1, 2 * k)
    return k[:, 0, 0].tolist()


def test_random_histories_equal_python_lists():
    """Extend, roll back, fork and free in random order: every row reads what a list would, and nothing
    leaks."""
    rng = random.Random(0)
    pool = PagePool(page_tokens=4)
    rows: list[tuple[Sequence, list[float]]] = []
    counter = 0
    for _ in range(150):
        action = rng.choice(["new", "extend", "extend", "rollback", "fork", "free"])
        if action == "new" or not rows:
            rows.append((Sequence(pool, expect_tokens=rng.choice([0, 5, 20])), []))
            continue
        sequence, values = rng.choice(rows)
        if action == "extend":
            new = [float(counter + i) for i in range(rng.randint(0, 9))]
            counter += len(new)
            write(pool, sequence, new)
            values += new
        elif action == "rollback":
            count = rng.randint(0, len(values))
            sequence.rollback(count)
            del values[len(values) - count :]
        elif action == "fork":
            rows.append((sequence.fork(expect_tokens=rng.choice([0, 8])), list(values)))
        else:
            sequence.free()
            rows = [row for row in rows if row[0] is not sequence]
        for other, expected in rows:
            if expected:
                assert read(pool, other) == expected
        held = {page for other, _ in rows for page in other.pages}
        assert pool.used_pages == len(held)
        assert sum(pool.references) == sum(len(other.pages) for other, _ in rows)
    for sequence, _ in rows:
        sequence.free()
    assert pool.used_pages == 0 and pool.capacity == 0 and not pool.layers


def test_a_shared_page_is_copied_only_when_written():
    pool = PagePool(page_tokens=4)
    first = Sequence(pool)
    write(pool, first, [0.0, 1, 2, 3, 4, 5])
    twin = first.fork()
    assert twin.pages == first.pages and pool.used_pages == 2
    write(pool, twin, [9.0])
    assert twin.pages[0] == first.pages[0] and twin.pages[1] != first.pages[1]
    assert read(pool, first) == [0, 1, 2, 3, 4, 5] and read(pool, twin) == [0, 1, 2, 3, 4, 5, 9]
    write(pool, first, [7.0])
    assert pool.used_pages == 3  # the last page is its own again: written in place
    assert read(pool, first) == [0, 1, 2, 3, 4, 5, 7] and read(pool, twin) == [0, 1, 2, 3, 4, 5, 9]


def test_shared_prefix_of_whole_blocks():
    """K6, the paging part: block size 4; a prefix found in full pages is shared, counted and outlives its
    owner."""
    pool = PagePool(page_tokens=4)
    for prompt in (3, 4, 5, 8, 12):
        first = Sequence(pool)
        write(pool, first, [float(i) for i in range(prompt)])
        # A hit leaves at least one token to compute: what is cached is at most prompt - 1, in whole pages.
        cached = (prompt - 1) // 4 * 4
        second = Sequence(pool)
        second.share(first.pages[: cached // 4], cached)
        assert second.length == cached <= prompt - 1
        write(pool, second, [float(i) for i in range(cached, prompt)])
        assert read(pool, second) == read(pool, first)
        assert pool.used_pages == -(-prompt // 4) * 2 - cached // 4
        first.free()
        assert read(pool, second) == [float(i) for i in range(prompt)]
        second.free()
        assert pool.used_pages == 0
    one, two = Sequence(pool), Sequence(pool)
    write(pool, one, [float(i) for i in range(8)] + [100.0])
    two.share(one.pages[:2], 8)
    write(pool, two, [200.0, 201.0])
    assert read(pool, one)[8:] == [100] and read(pool, two)[8:] == [200, 201]
    assert [pool.references[p] for p in one.pages] == [2, 2, 1]


def test_a_full_budget_refuses_and_changes_nothing():
    pool = PagePool(page_tokens=4, budget_pages=3)
    first, second = Sequence(pool, expect_tokens=12), Sequence(pool, expect_tokens=12)
    write(pool, first, [0.0, 1, 2, 3, 4])
    write(pool, second, [5.0])  # a claim of others is no obstacle
    with pytest.raises(PatchError, match="all 3 KV pages of 4 tokens"):
        second.extend(4)
    assert (second.length, pool.free_pages) == (1, 0)
    assert read(pool, second) == [5]
    first.free()
    assert pool.free_pages == 2
    write(pool, second, [6.0, 7, 8, 9])
    assert read(pool, second) == [5, 6, 7, 8, 9]
    second.free()
    assert pool.free_pages == 3


def test_growth_keeps_what_is_stored():
    pool = PagePool(page_tokens=2)
    sequence = Sequence(pool)
    version = pool.version
    for i in range(100):
        write(pool, sequence, [float(i)])
    assert read(pool, sequence) == list(range(100)) and pool.version > version


def test_claims_keep_rows_on_neighbouring_pages():
    pool = PagePool(page_tokens=4)
    pool.reserve(3 * 8)
    rows = [Sequence(pool, expect_tokens=32) for _ in range(3)]
    version = None
    for _ in range(32):
        for row in rows:
            write(pool, row, [1.0])
        version = version or pool.version
    assert all(row.pages == list(range(row.pages[0], row.pages[0] + 8)) for row in rows)
    assert pool.version == version  # no growth on the way


def test_bytes_of_a_token():
    """2 x layers x KV heads x head size x bytes; INT8 adds 4 bytes of scale per head, for K and for V."""
    for bits, dtype, expected in (
        (None, torch.bfloat16, 2 * 2 * GROUPS * SIZE * 2),
        (None, torch.float32, 2 * 2 * GROUPS * SIZE * 4),
        (8, torch.bfloat16, 2 * 2 * GROUPS * (SIZE + 4)),
    ):
        pool = PagePool(bits=bits)
        pool.claim(1)
        for layer in (0, 1):
            pool.ensure_layer(layer, GROUPS, SIZE, SIZE, dtype, torch.device("cpu"))
        assert pool.bytes_per_token() == expected


def test_another_shape_is_refused():
    pool = PagePool()
    sequence = Sequence(pool)
    write(pool, sequence, [1.0])
    wrong = torch.zeros(1, GROUPS + 1, SIZE)
    with pytest.raises(PatchError, match="layer 0: the pages hold 2 heads of 8"):
        pool.layer(0, wrong, wrong)
    with pytest.raises(PatchError, match="roll back 2 of 1"):
        sequence.rollback(2)
    with pytest.raises(PatchError, match="4"):
        PagePool(bits=4)


def test_growth_that_ends_half_way_is_seen_and_made_good(monkeypatch):
    """Out of memory at the second layer: the first has moved, so whoever holds pointers must look again."""
    pool = PagePool(page_tokens=4)
    sequence = Sequence(pool)
    write(pool, sequence, [0.0, 1, 2])
    real, calls = pages.zeros, []

    def zeros(*args):
        calls.append(args)
        if len(calls) == 3:  # K and V of layer 0, then this
            raise MemoryError
        return real(*args)

    before = pool.version
    monkeypatch.setattr(pages, "zeros", zeros)
    with pytest.raises(MemoryError):
        sequence.extend(100)
    monkeypatch.undo()
    assert pool.version != before and sequence.length == 3 and read(pool, sequence) == [0, 1, 2]
    write(pool, sequence, [float(i) for i in range(3, 103)])
    assert read(pool, sequence) == list(range(103))
    sequence.free()
    assert pool.used_pages == 0


def test_a_copy_on_write_that_fails_leaks_nothing(monkeypatch):
    pool = PagePool(page_tokens=4)
    one = Sequence(pool)
    write(pool, one, [1.0, 2])
    two = one.fork()

    def fails(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(pool, "copy", fails)
        with pytest.raises(MemoryError):
            two.extend(1)
    assert pool.used_pages == 1 and pool.references[one.pages[0]] == 2
    write(pool, two, [3.0])
    assert read(pool, one) == [1, 2] and read(pool, two) == [1, 2, 3]
    one.free()
    two.free()
    assert pool.used_pages == 0


def test_a_cache_collected_in_the_middle_of_a_claim_is_freed_afterwards(monkeypatch):
    """The collector runs its finalizers wherever it likes, on the thread that is changing the tables."""
    pool = PagePool(page_tokens=4)
    old = Sequence(pool)
    old.extend(9)
    grow = pool._grow

    def grow_and_collect(capacity):
        grow(capacity)
        if old.pages:
            pool.drop([old])
            assert old.pages  # not now

    monkeypatch.setattr(pool, "_grow", grow_and_collect)
    sequence = Sequence(pool, expect_tokens=400)
    sequence.extend(3)
    assert pool.used_pages == 1 and not old.pages and len(pool._busy) == pool.capacity >= 100
    sequence.free()
    assert pool.used_pages == pool.capacity == 0
    many = [Sequence(pool) for _ in range(1500)]  # more than Python's stack has frames
    for one in many:
        one.extend(1)
    pool.drop(many)  # nobody is inside: at once
    assert pool.used_pages == pool.capacity == 0


def test_a_sequence_adopts_a_page_of_the_same_tokens():
    pool = PagePool(page_tokens=4, budget_pages=6)
    first, second = Sequence(pool), Sequence(pool)
    first.extend(4), second.extend(6)
    own = second.pages[0]
    second.adopt(0, first.pages[0])
    assert second.pages[0] == first.pages[0] == second.table[0] and pool.references[own] == 0
    assert pool.used_pages == 2 and pool.references[first.pages[0]] == 2
    with pytest.raises(PatchError, match="not full"):
        second.adopt(1, first.pages[0])
    first.empty()
    second.adopt(0, second.pages[0])
    assert pool.references[second.pages[0]] == 1
    second.empty()
    assert pool.used_pages == 0
