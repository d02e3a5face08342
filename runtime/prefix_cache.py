"""Which block holds the K/V of which prefix: the index that lets prompts share blocks."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvmpaged.runtime.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Sequence


def digest_of(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Chain one block's token ids, packed as int64, onto the digest of all tokens before it."""
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}q", *token_ids)).digest()


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The tokens of one full block and, through `parent`, all tokens before them."""

    parent: Prefix | None
    token_ids: tuple[int, ...]
    digest: bytes

    @classmethod
    def extend(cls, parent: Prefix | None, token_ids: Sequence[int]) -> Prefix:
        """Return `parent` followed by one more full block of tokens."""
        digest = digest_of(parent.digest if parent else b"", token_ids)
        return cls(parent, tuple(token_ids), digest)

    def has_tokens_of(self, other: Prefix) -> bool:
        """Compare every token from position 0; chains that share a parent stop there at once."""
        mine: Prefix | None = self
        theirs: Prefix | None = other
        while mine is not theirs:
            if mine is None or theirs is None or mine.token_ids != theirs.token_ids:
                return False
            mine, theirs = mine.parent, theirs.parent
        return True


class PrefixCache:
    """An index from digests to blocks, at most one block per prefix and one prefix per block.

    The digest only finds a candidate. A hit is decided by comparing tokens, so neither a collision
    nor a bug in the digest can serve the K/V of other tokens. The cache holds no block: who may
    reuse or evict one is the block manager's business.

    Parameters
    ----------
    block_size : int
        Tokens per block; only full blocks enter.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._entries: dict[bytes, tuple[Prefix, int]] = {}
        self._prefixes: dict[int, Prefix] = {}

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._prefixes

    def match(self, token_ids: Sequence[int]) -> list[tuple[Prefix, int]]:
        """Find the longest cached prefix.

        Parameters
        ----------
        token_ids : sequence of int
            A prompt, from position 0.

        Returns
        -------
        list of (Prefix, int)
            One (prefix, block_id) per full block, in order of position.
        """
        hits: list[tuple[Prefix, int]] = []
        parent: Prefix | None = None
        for end in range(self._block_size, len(token_ids) + 1, self._block_size):
            wanted = Prefix.extend(parent, token_ids[end - self._block_size : end])
            entry = self._entries.get(wanted.digest)
            if entry is None or not entry[0].has_tokens_of(wanted):
                break
            hits.append(entry)
            parent = entry[0]
        return hits

    def add(self, prefix: Prefix, block_id: int) -> Prefix:
        """Enter a block, unless another one already stands for the digest: the first stays.

        Returns
        -------
        Prefix
            The equal prefix that is in the index, if there is one, so that chains share their
            parents; else `prefix`.
        """
        entry = self._entries.get(prefix.digest)
        if entry is None:
            self._entries[prefix.digest] = prefix, block_id
            self._prefixes[block_id] = prefix
        elif entry[0].has_tokens_of(prefix):
            return entry[0]
        return prefix

    def drop(self, block_id: int) -> None:
        """Forget a block that is about to be rewritten; a block that is not in is left alone."""
        prefix = self._prefixes.pop(block_id, None)
        if prefix is not None:
            del self._entries[prefix.digest]

    def check_integrity(self) -> None:
        """Recount the index in both directions; O(blocks)."""
        for block_id, prefix in self._prefixes.items():
            if self._entries.get(prefix.digest) != (prefix, block_id):
                raise IntegrityError(f"block {block_id}: the index does not point back to it")
        if len(self._entries) != len(self._prefixes):
            lost = {b for _, b in self._entries.values()} - self._prefixes.keys()
            raise IntegrityError(f"blocks {sorted(lost)}: in the index without a prefix")

    def check_block(self, block_id: int, prefix: Prefix | None, tail: Sequence[int]) -> None:
        """Check that a block, if it is in the index, stands for `prefix` followed by `tail`.

        Parameters
        ----------
        block_id : int
            A block that a sequence holds.
        prefix : Prefix or None
            The holder's tokens before this block; None at position 0.
        tail : sequence of int
            The holder's tokens in this block; fewer than block_size after a truncation.
        """
        known = self._prefixes.get(block_id)
        if known is None:
            return
        same_tail = list(known.token_ids[: len(tail)]) == list(tail)
        if not same_tail or not Prefix(prefix, known.token_ids, b"").has_tokens_of(known):
            raise IntegrityError(f"block {block_id}: the index knows it by other tokens")
