"""Pages that outlive their request, found again by the tokens before them.

A radix tree whose edges are whole pages: a node is one full page, reached by the page_tokens ids in it from
the node of the page before. So a page is found only behind the same tokens from the very first one on, under
the same key (version of the weights, adapter). The tree holds one reference to each page; a sequence that
shares it holds another, and a page which it would write to is copied first (`Sequence.extend`), so a prompt
may end in the middle of a cached page.

Pages that nobody but the tree holds are given back when they are needed, the least recently used leaf first.
A sequence that holds a page holds all pages before it, since it takes over those that the tree has already:
what is unreferenced has no referenced page behind it.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from hfaccel.cache.pool import PagePool
from hfaccel.cache.pool import Sequence as Holder


@dataclass(eq=False)
class Node:
    """One full page, or the root of a key (page -1)."""

    page: int
    tokens: tuple[int, ...]
    parent: Node | None
    used: int = 0  # the tree's clock when it was last found or put in
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    firsts: dict[int, list[Node]] = field(default_factory=dict)  # children by their first token

    def add(self, child: Node) -> None:
        self.children[child.tokens] = child
        self.firsts.setdefault(child.tokens[0], []).append(child)

    def remove(self, child: Node) -> None:
        del self.children[child.tokens]
        same = self.firsts[child.tokens[0]]
        same.remove(child)
        if not same:
            del self.firsts[child.tokens[0]]


class PrefixTree:
    """The cached pages of one pool. Not thread-safe: it is the engine's, which runs on one thread.

    Attributes: evicted: pages given back so far.
    """

    def __init__(self, pool: PagePool):
        self.pool = pool
        self.roots: dict[Hashable, Node] = {}
        self._nodes: dict[int, Node] = {}  # by page
        self._clock = 0
        self.evicted = 0

    def __len__(self) -> int:
        """Pages that it holds."""
        return len(self._nodes)

    @property
    def evictable(self) -> int:
        """Pages that nobody else holds."""
        references = self.pool.references
        return sum(references[page] == 1 for page in self._nodes)

    def match(
        self, key: Hashable, tokens: Sequence[int], *, limit: int, partial: bool = True
    ) -> tuple[list[int], int]:
        """The longest cached beginning of `tokens`, `limit` tokens at most.

        Args:
            partial: it may end in the middle of a page, which then is copied before it is written to.
        Returns: pages, and how many tokens of them: what `Sequence.share` takes.
        """
        size = self.pool.page_tokens
        node = self.roots.get(key)
        pages: list[int] = []
        length, limit = 0, min(limit, len(tokens))
        self._clock += 1
        while node is not None and length < limit:
            child = None
            if length + size <= limit:
                child = node.children.get(tuple(tokens[length : length + size]))
            if child is None:
                if partial:
                    child, found = self._closest(node, tokens, length, limit)
                    if child is not None:
                        child.used = self._clock
                        pages.append(child.page)
                        length += found
                break
            child.used = self._clock
            pages.append(child.page)
            length += size
            node = child
        return pages, length

    def _closest(self, node: Node, tokens: Sequence[int], at: int, limit: int) -> tuple[Node | None, int]:
        """The child that shares most tokens with tokens[at : limit], and how many."""
        best, most = None, 0
        wanted = tokens[at : min(limit, at + self.pool.page_tokens)]
        for child in node.firsts.get(wanted[0], ()):
            same = 0
            for mine, theirs in zip(wanted, child.tokens, strict=False):
                if mine != theirs:
                    break
                same += 1
            if same > most:
                best, most = child, same
        return best, most

    def insert(self, key: Hashable, tokens: Sequence[int], sequence: Holder) -> int:
        """Keep the full pages of a sequence that holds `tokens`. Where the tree has a page of the same tokens
        already, the sequence reads that one from now on and its own is free.

        Returns: how many pages are new here.
        """
        size = self.pool.page_tokens
        full = min(len(tokens), sequence.length) // size
        if not full:
            return 0
        self._clock += 1
        node = self.roots.get(key)
        if node is None:
            node = self.roots[key] = Node(-1, (), None)
        new = 0
        for index in range(full):
            part = tuple(tokens[index * size : (index + 1) * size])
            child = node.children.get(part)
            page = sequence.pages[index]
            if child is None:
                child = Node(page, part, node)
                node.add(child)
                self.pool.share(page)
                self._nodes[page] = child
                new += 1
            elif child.page != page:
                sequence.adopt(index, child.page)
            child.used = self._clock
            node = child
        return new

    def evict(self, pages: int) -> int:
        """Give back up to so many pages that nobody else holds, least recently used leaves first.

        Returns: how many were given back.
        """
        references = self.pool.references
        order = 0
        heap = []
        for node in self._nodes.values():
            if not node.children and references[node.page] == 1:
                heap.append((node.used, order, node))
                order += 1
        heapq.heapify(heap)
        given = 0
        while heap and given < pages:
            node = heapq.heappop(heap)[2]
            parent = node.parent
            self._drop(node)
            given += 1
            if parent.page >= 0 and not parent.children and references[parent.page] == 1:
                heapq.heappush(heap, (parent.used, order, parent))
                order += 1
        self.evicted += given
        return given

    def _drop(self, node: Node) -> None:
        node.parent.remove(node)
        del self._nodes[node.page]
        self.pool.release(node.page)
        root = node.parent
        if root.page < 0 and not root.children:
            for key, one in list(self.roots.items()):
                if one is root:
                    del self.roots[key]

    def forget(self, key: Hashable) -> int:
        """Let go of all pages of a key, whoever else holds them. Returns: how many."""
        root = self.roots.pop(key, None)
        if root is None:
            return 0
        gone = 0
        for node in _below(root):
            del self._nodes[node.page]
            self.pool.release(node.page)
            gone += 1
        return gone

    def clear(self) -> None:
        """Let go of everything."""
        for key in list(self.roots):
            self.forget(key)


def _below(root: Node) -> Iterator[Node]:
    left = list(root.children.values())
    while left:
        node = left.pop()
        yield node
        left += node.children.values()
