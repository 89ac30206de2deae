"""One draw of a sealed sum disclosed to an auditor this hospital chose: recorded first, then sealed to their key.

Refuses what the site's ledger refuses to disclose (:mod:`client.ledger.site_disclosures`), and to replace a file.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from client.ledger.site_disclosures import DisclosedDraw
from client.ledger.site_ledger import SiteLedger
from client.policy import SiteConfig, load_site
from client.site.books import open_books, read_books
from common.disclosure import Disclosure, SealedDisclosure
from common.errors import InvalidInput
from common.ledger.keys import sealing_public_key
from common.ledger.rows import format_time
from common.objects import write_atomically
from common.peers import Peer


def look_at_draw(site_dir: Path, draw: str) -> DisclosedDraw:
    """What disclosing a draw would show and cost, for a person to read before it is done."""
    with read_books(load_site(site_dir)) as ledger:
        return ledger.look_at_draw(draw)


def disclose(site_dir: Path, draw: str, *, auditor: str, out: Path, now: datetime) -> DisclosedDraw:
    """Write the disclosure of a draw, sealed to ``auditor`` (X25519, 64 hex digits), to the new file ``out``.

    Args:
        draw: Its roster's id, or the first twelve digits of it or more.

    Raises:
        InvalidInput: For a draw this site sent no words in, a key that is none, or a file that exists.
        Refused: If a patient was withdrawn since, or the draw is from before it could be disclosed.
    """
    sealing_public_key(auditor)
    if out.exists():
        raise InvalidInput("the output file exists already", value=str(out), remedy="name another file with --out")
    config = load_site(site_dir)
    with open_books(config) as ledger:
        shown, sealed = sealed_disclosure(config, ledger, draw, auditor=auditor, now=now)
    write_atomically(out, sealed.render(), mode=0o600)
    return shown


def sealed_disclosure(
    config: SiteConfig, ledger: SiteLedger, draw: str, *, auditor: str, now: datetime
) -> tuple[DisclosedDraw, SealedDisclosure]:
    """Put the disclosure on record and seal it; with it, what it shows."""
    shown, private = ledger.disclose(draw, auditor=auditor)
    peers = tuple(Peer(site, key) for site, key in sorted(ledger.peers(shown.draw.study).items()))
    said = Disclosure(config.site, shown.roster, auditor, _hex(private), peers, format_time(now))
    return shown, SealedDisclosure.of(said.signed_by(ledger.sign))


def _hex(private: X25519PrivateKey) -> str:
    return private.private_bytes_raw().hex()
