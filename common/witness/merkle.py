"""Computes Merkle trees over a ledger's row hashes: the root of a head, and proofs about two heads that reveal no row.

Called when heads are made, countersigned and verified. The tree is that of RFC 6962 (section 2.1); a leaf is the 32
bytes of a row's hash. A proof is a list of hashes in hex. A proof is invalid if its length is not the one that the
sizes of the trees require.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

MAX_PROOF = 128
"""Most hashes in a proof: twice the depth of a tree of 2⁶⁴ leaves."""


def root(leaves: Sequence[bytes]) -> bytes:
    """Return the root over leaves.

    Args:
        leaves: Leaves of 32 bytes.

    Returns:
        32 bytes.

    >>> root([]).hex()[:16]
    'e3b0c44298fc1c14'
    """
    if not leaves:
        return hashlib.sha256().digest()
    level = [hashlib.sha256(b"\0" + leaf).digest() for leaf in leaves]
    while len(level) > 1:  # an odd node moves up unchanged, which equals the RFC's split at a power of two
        paired = [_node(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = paired + level[len(paired) * 2 :]
    return level[0]


def prove_growth(leaves: Sequence[bytes], old: int) -> list[str]:
    """Return a consistency proof: that the tree of these leaves extends the tree of its first ``old`` leaves (RFC 6962,
    2.1.2).

    Args:
        leaves: All leaves.
        old: Number of leaves of the smaller tree.

    Returns:
        Hashes in hex; empty if ``old`` is 0 or too large.
    """
    if not 0 < old <= len(leaves):
        return []
    return [one.hex() for one in _subproof(old, leaves, whole=True)]


def grew(proof: Sequence[str], *, old: int, old_root: bytes, new: int, new_root: bytes) -> bool:
    """Check a consistency proof: that the leaves of a larger tree begin with the leaves of a smaller tree.

    Args:
        proof: Hashes in hex.
        old: Leaves of the smaller tree.
        old_root: Its root.
        new: Leaves of the larger tree.
        new_root: Its root.

    Returns:
        True if the proof is valid.

    Source: RFC 9162, section 2.1.4.2.
    """
    if old > new or (nodes := _bytes_of(proof)) is None:
        return False
    if old == new:
        return not nodes and old_root == new_root
    if old == 0:
        return not nodes
    if old & (old - 1) == 0:
        nodes = [old_root, *nodes]
    if not nodes:
        return False
    first, last = old - 1, new - 1
    while first & 1:
        first, last = first >> 1, last >> 1
    return _climbed(nodes[0], nodes[1:], first, last) == (old_root, new_root)


def prove_leaf(leaves: Sequence[bytes], index: int) -> list[str]:
    """Return a proof that a leaf is in the tree of these leaves (RFC 6962, 2.1.1).

    Args:
        leaves: All leaves.
        index: Index of the leaf, from 0.

    Returns:
        Hashes in hex; empty if the index is out of range.
    """
    return [one.hex() for one in _path(index, leaves)] if 0 <= index < len(leaves) else []


def has_leaf(proof: Sequence[str], *, leaf: bytes, index: int, size: int, of: bytes) -> bool:
    """Check a proof that a tree has a leaf.

    Args:
        proof: Hashes in hex.
        leaf: The leaf.
        index: Its index, from 0.
        size: Leaves of the tree.
        of: Root of the tree.

    Returns:
        True if the proof is valid.

    Source: RFC 9162, section 2.1.3.2.
    """
    nodes = _bytes_of(proof)
    if nodes is None or not 0 <= index < size:
        return False
    reached = _climbed(hashlib.sha256(b"\0" + leaf).digest(), nodes, index, size - 1)
    return reached is not None and reached[1] == of


def _climbed(node: bytes, path: Sequence[bytes], first: int, last: int) -> tuple[bytes, bytes] | None:
    """Return the roots of the smaller and the larger tree to which a node's path leads; None if its length is wrong."""
    from_old = from_new = node
    for other in path:
        if last == 0:
            return None
        if first & 1 or first == last:
            from_old, from_new = _node(other, from_old), _node(other, from_new)
            while not first & 1 and first:
                first, last = first >> 1, last >> 1
        else:
            from_new = _node(from_new, other)
        first, last = first >> 1, last >> 1
    return (from_old, from_new) if last == 0 else None


def _bytes_of(proof: Sequence[str]) -> list[bytes] | None:
    return [bytes.fromhex(one) for one in proof] if len(proof) <= MAX_PROOF else None


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()


def _split(size: int) -> int:
    """Return the largest power of two below ``size``."""
    return 1 << (size - 1).bit_length() - 1


def _path(index: int, leaves: Sequence[bytes]) -> list[bytes]:
    if len(leaves) == 1:
        return []
    k = _split(len(leaves))
    if index < k:
        return [*_path(index, leaves[:k]), root(leaves[k:])]
    return [*_path(index - k, leaves[k:]), root(leaves[:k])]


def _subproof(old: int, leaves: Sequence[bytes], *, whole: bool) -> list[bytes]:
    if old == len(leaves):
        return [] if whole else [root(leaves)]
    k = _split(len(leaves))
    if old <= k:
        return [*_subproof(old, leaves[:k], whole=whole), root(leaves[k:])]
    return [*_subproof(old - k, leaves[k:], whole=False), root(leaves[:k])]
