"""Discloses to an auditor the mask key that this site used in one draw of a sealed sum.

`consilium site disclose` calls it. A *draw* is one attempt at a sealed sum (secure aggregation). The disclosure is
recorded in the site's ledger first, then encrypted to the auditor's key. With the mask key the auditor can compute the
site's code plus its own share of the noise. The module refuses what the site's ledger refuses to disclose
(:mod:`client.ledger.site_sealed`), and an output file that exists.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from client.ledger.site_ledger import SiteLedger
from client.ledger.site_sealed import DisclosedDraw
from client.policy import SiteConfig, load_site
from client.site.books import open_books, read_books
from common.disclosure import Disclosure, SealedDisclosure
from common.ledger.keys import sealing_public_key
from common.ledger.rows import format_time
from common.objects import check_new, write_atomically
from common.peers import Peer


def disclosure_cost(site_dir: Path, draw: str) -> DisclosedDraw:
    """Compute the privacy cost of disclosing a draw's mask key, so that a person can read it before disclosing the key.

    Args:
        site_dir: The site's directory.
        draw: Id of the draw's roster (its list of hospitals), or at least its first twelve digits.

    Returns:
        The draw and its cost.

    Raises:
        InvalidInput: If the draw is not found.
        Refused: If a patient was withdrawn since, or an earlier version of this program made the draw.
    """
    with read_books(load_site(site_dir)) as ledger:
        return ledger.disclosure_cost(draw)


def disclose(site_dir: Path, draw: str, *, auditor: str, out: Path, now: datetime) -> DisclosedDraw:
    """Record the disclosure of a draw in the site's ledger, and write it to a file that only the auditor can decrypt.

    Args:
        site_dir: The site's directory.
        draw: Id of the draw's roster (its list of hospitals), or at least its first twelve digits.
        auditor: The auditor's sealing key, X25519 in 64 hex digits.
        out: New file to write.
        now: Time in the disclosure.

    Returns:
        The draw and its cost.

    Raises:
        InvalidInput: For a draw in which this site sent nothing, an invalid key, or a file that exists.
        Refused: If a patient was withdrawn since, or an earlier version made the draw.
    """
    sealing_public_key(auditor)
    check_new(out)
    config = load_site(site_dir)
    with open_books(config) as ledger:
        shown, sealed = sealed_disclosure(config, ledger, draw, auditor=auditor, now=now)
    write_atomically(out, sealed.render(), mode=0o600)
    return shown


def sealed_disclosure(
    config: SiteConfig, ledger: SiteLedger, draw: str, *, auditor: str, now: datetime
) -> tuple[DisclosedDraw, SealedDisclosure]:
    """Record the disclosure of a draw in the site's ledger, sign it, and encrypt it to the auditor's key.

    Args:
        config: The site's policy.
        ledger: The site's ledger.
        draw: Id of the draw's roster (its list of hospitals), or at least its first twelve digits.
        auditor: The auditor's sealing key, X25519 in 64 hex digits.
        now: Time in the disclosure.

    Returns:
        The draw with its cost, and the sealed disclosure.

    Raises:
        InvalidInput: For a draw in which this site sent nothing.
        Refused: If a patient was withdrawn since, or an earlier version made the draw.
    """
    shown, private = ledger.disclose(draw, auditor=auditor)
    peers = tuple(Peer(site, key) for site, key in sorted(ledger.peers(shown.draw.study).items()))
    said = Disclosure(config.site, shown.roster, auditor, private.private_bytes_raw().hex(), peers, format_time(now))
    return shown, SealedDisclosure.of(said.signed_by(ledger.sign))
