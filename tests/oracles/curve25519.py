"""Computes Curve25519 by the textbook: affine Edwards arithmetic over Python's integers, and points of small
order.

Source: RFC 8032, sections 5.1.3 and 5.1.4; RFC 7748, section 4.1 (the map between the two curves).
"""

from __future__ import annotations

P = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, P) % P
_ROOT = pow(2, (P - 1) // 4, P)

Point = tuple[int, int]
NEUTRAL: Point = (0, 1)


def on_curve(y: int, *, odd: bool) -> Point | None:
    """Return the point with this y and this parity of x; None if there is none."""
    square = (y * y - 1) * pow(_D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    x = x if x * x % P == square else x * _ROOT % P
    if x * x % P != square:
        return None
    return (x if x % 2 == odd else -x % P), y % P


def added(one: Point, other: Point) -> Point:
    (x1, y1), (x2, y2) = one, other
    both = _D * x1 * x2 * y1 * y2 % P
    x = (x1 * y2 + x2 * y1) * pow(1 + both, -1, P) % P
    return x, (y1 * y2 + x1 * x2) * pow(1 - both, -1, P) % P


def times(scalar: int, point: Point) -> Point:
    total = NEUTRAL
    for bit in bin(scalar)[2:]:
        total = added(total, total)
        total = added(total, point) if bit == "1" else total
    return total


def small_order() -> list[Point]:
    """Return the eight points whose order divides 8."""
    y = 2
    while (found := on_curve(y, odd=False)) is None or times(4, times(ORDER, found)) == NEUTRAL:
        y += 1
    eighth = times(ORDER, found)
    return [times(i, eighth) for i in range(8)]


def edwards_hex(point: Point) -> str:
    return (point[1] | (point[0] % 2) << 255).to_bytes(32, "little").hex()


def montgomery(point: Point) -> int:
    """Return u of a point; 0 for the neutral one, as X25519 defines it."""
    return (1 + point[1]) * pow(1 - point[1], -1, P) % P if point[1] != 1 else 0


def of_montgomery(u: int) -> Point:
    point = on_curve((u - 1) * pow(u + 1, -1, P) % P, odd=False)
    assert point is not None
    return point


def agreement_hex(u: int) -> str:
    return u.to_bytes(32, "little").hex()
