"""Reads from an adapted network's bundle on which of the hospital's patients the network was trained.

Evaluation, the hospital's page and adaptation call it. A bundle without this record gives no patients.
"""

from __future__ import annotations

from pathlib import Path

from common.reading import lenient_json

SEEN_FILE = "configs/seen.json"
"""File of an adapted bundle: the keyed hashes of the patients it was trained on, by deal."""


def seen_by(bundle: Path) -> dict[str, frozenset[str]]:
    """Read from a bundle on which patients its adapted network was trained.

    Args:
        bundle: The bundle's folder.

    Returns:
        Keyed hashes of the patients, by the deal (assignment of patients to voters) whose key made the hashes; empty if
        the bundle does not contain them.
    """
    try:
        found = lenient_json((bundle / SEEN_FILE).read_text(encoding="utf-8"))
        return {deal: frozenset(map(str, subjects)) for deal, subjects in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
