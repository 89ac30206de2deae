"""Keeps what this site was told about the other hospitals' keys, and which of them a person here has confirmed.

`consilium site peers` and the worker call it. A site receives keys in three ways, and trusts none of them: the
consortium's list in a file, its list from the network, and the peers named in offers. A key is trusted only after a
person here has compared its fingerprint with that hospital itself; this is recorded in the site's own ledger. It
refuses to confirm a key whose fingerprint was neither given nor shown.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from client.ledger.site_ledger import SiteLedger
from client.policy import SiteConfig, load_site
from client.site.books import consent_missing, joined_study, open_books, read_books
from client.site.fetch import OnWait, PublicObjects
from common.document import Count, Document, Sha256
from common.errors import InvalidInput
from common.hospital_page import OwnAlarm
from common.objects import write_atomically
from common.peers import Peer, Peers, fingerprint, read_peers, write_peers
from common.public_keys import is_fingerprint
from common.reading import parse_json

LISTED, OFFERED = "peers.json", "peers-offered.json"
"""Files in a site's directory: the consortium's newest list, and the peers named in offers. Neither makes a key
trusted."""
MAX_OFFERED = 1024

log = logging.getLogger(__name__)


class PeerTrust(StrEnum):
    """How this site judges a key that it received as the key of another hospital.

    Attributes:
        CONFIRMED: A person at this site has compared the key's fingerprint with that hospital.
        NOT_CONFIRMED: Nobody has compared it, and no other key of that hospital is confirmed.
        KEY_CHANGED: Another key of that hospital is confirmed.
        KEY_OF_ANOTHER: The same key is confirmed for a different hospital.
        NOT_OURS: It was received with this site's own name, or it is this site's own key under another name.
    """

    CONFIRMED = "confirmed"
    NOT_CONFIRMED = "NOT CONFIRMED"
    KEY_CHANGED = "KEY CHANGED"
    KEY_OF_ANOTHER = "KEY OF ANOTHER"
    NOT_OURS = "NOT OUR KEY"


@dataclass(frozen=True, slots=True)
class KnownPeer:
    """A key that was named as the key of a hospital, and how this site judges it.

    Attributes:
        peer: Site and key.
        trust: How this site judges the key.
        heard: The sources from which this site received the key.
    """

    peer: Peer
    trust: PeerTrust
    heard: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """The key's fingerprint, which people read out to compare it."""
        return fingerprint(self.peer.key)


_NEW = PeerTrust.NOT_CONFIRMED
_TALK = (
    "call that hospital at a number you know; if the key is not theirs, pause the study and talk to the other sites "
    "first"
)
_WRONG = (
    (
        PeerTrust.NOT_OURS,
        "this site's own name or key was given to {}",
        "if that is this hospital's admitted name, correct `site` in site.toml; else tell the other sites, then the "
        "consortium",
    ),
    (PeerTrust.KEY_OF_ANOTHER, "a list or an offer gives {} a key that is confirmed for another site", _TALK),
    (
        PeerTrust.KEY_CHANGED,
        "a new key, other than the confirmed one, was received for {}",
        f"{_TALK}; if it is theirs, `consilium site peers --confirm NAME`",
    ),
)


def _names(known: Sequence[KnownPeer]) -> str:
    return ", ".join(dict.fromkeys(one.peer.site for one in known))


@dataclass(frozen=True, slots=True)
class PeersView:
    """Every key of another hospital that this site has confirmed or received for its study.

    Attributes:
        study: Id of the study.
        own: This site and its key.
        sealed: True if the study uses sealed sums.
        quorum: The study's quorum.
        peers: The keys, by site.
    """

    study: str
    own: Peer
    sealed: bool
    quorum: int
    peers: tuple[KnownPeer, ...]

    def with_trust(self, *trusts: PeerTrust) -> tuple[KnownPeer, ...]:
        """Return the keys with one of these judgements.

        Args:
            trusts: Judgements.

        Returns:
            The keys.
        """
        return tuple(known for known in self.peers if known.trust in trusts)

    def problems(self) -> tuple[OwnAlarm, ...]:
        """Return the problems that a person must look into, the worst first; none in a study without sealed sums.

        Returns:
            The problems.
        """
        if not self.sealed:
            return ()
        found = [
            OwnAlarm(text.format(_names(self.with_trust(trust))), remedy, stops=True)
            for trust, text, remedy in _WRONG
            if self.with_trust(trust)
        ]
        missing, unknown = self.quorum - 1 - len(self.with_trust(PeerTrust.CONFIRMED)), self.with_trust(_NEW)
        if missing > 0 or unknown:
            text = f"not confirmed here: {_names(unknown) or 'none is listed'}"
            if missing > 0:
                needed = f"{missing} more {'is' if missing == 1 else 'are'} needed"
                text += f"; nothing is released with fewer than {self.quorum} sites, so {needed}"
            remedy = "call these hospitals, then `consilium site peers --confirm NAME` for each"
            found.append(OwnAlarm(text, remedy if unknown else "`consilium site peers --fetch`", stops=missing > 0))
        return tuple(found)

    def to_json(self) -> dict[str, object]:
        """Return plain values for JSON."""
        return {
            "study": self.study,
            "own": {**self.own.to_json(), "fingerprint": fingerprint(self.own.key)},
            "peers": [
                {**known.peer.to_json(), "fingerprint": known.fingerprint}
                | {"standing": known.trust.value, "heard": list(known.heard)}
                for known in self.peers
            ],
        }


@dataclass(frozen=True, slots=True)
class OfferedPeers(Document):
    """The content of ``peers-offered.json``: keys named in offers that were not confirmed at that time, newest last.

    If a site appears with several keys, the server has given different keys at different times.
    """

    SCHEMA = (OFFERED, 1)

    study: Sha256
    peers: Annotated[tuple[Peer, ...], Count("peers that offers named", most=MAX_OFFERED)]


def peers_view(directory: Path) -> PeersView:
    """Return all keys of other sites that this site confirmed or received. Nothing is changed.

    Args:
        directory: The site's directory.

    Returns:
        The view.

    Raises:
        InvalidInput: If the ledger or a stored list cannot be read.
    """
    config = load_site(directory)
    with read_books(config) as ledger:
        return _view(config, ledger)


def store_list(directory: Path, listed: Peers) -> None:
    """Store the consortium's list of peers, so that it can be shown. No key becomes trusted by this.

    Args:
        directory: The site's directory.
        listed: The list.

    Raises:
        InvalidInput: If it is of another study.
    """
    write_peers(directory / LISTED, _of_study(listed, _study(load_site(directory))))


def fetch(directory: Path, *, on_wait: OnWait = lambda said: None) -> None:
    """Fetch the list of peers from the server and store it.

    Args:
        directory: The site's directory.
        on_wait: Called with a sentence about each wait for the server.

    Raises:
        InvalidInput: If it cannot be fetched, or is of another study.
    """
    config = load_site(directory)
    store_list(directory, PublicObjects(config, on_wait=on_wait).peers(_study(config)))


def check_other(directory: Path, site: str) -> None:
    """Refuse this site's own name as the name of a peer.

    Args:
        directory: The site's directory.
        site: Name of the peer.

    Raises:
        InvalidInput: If it is this site's name.
    """
    own = load_site(directory).site  # the ledger may be kept under another site's name
    if site == own:
        raise InvalidInput(
            "peer",
            value=site,
            limit="another site than this one",
            remedy="give the name of the hospital whose fingerprint you compared; `consilium site peers` lists them, "
            "and this site's own fingerprint for you to read out to them",
        )


def confirm(directory: Path, site: str, read_out: str) -> Peer:
    """Record that a peer's key has the fingerprint that this hospital itself read out, for example on the telephone.

    Args:
        directory: The site's directory.
        site: Name of the peer.
        read_out: The fingerprint as read out.

    Returns:
        The confirmed peer.

    Raises:
        InvalidInput: If the peer is this site, or no key that this site received has this fingerprint. The error does
            not show the fingerprints of received keys, because a person could copy them without asking the hospital.
    """
    check_other(directory, site)
    view = peers_view(directory)
    told = [known.peer for known in view.peers if known.peer.site == site]
    if not told:
        raise InvalidInput(
            "peer",
            value=site[:80],
            limit="a peer whose key this site has received: "
            f"{', '.join(sorted({known.peer.site for known in view.peers})) or 'none yet'}",
            remedy="run `consilium site peers --fetch`, or give the consortium's list with --take",
        )
    peer = next((peer for peer in told if is_fingerprint(read_out, fingerprint(peer.key))), None)
    if peer is None:
        raise InvalidInput(
            f"fingerprint of {site}",
            value=read_out[:80],
            limit="the fingerprint of a key that this site has received",
            remedy="ask the hospital to read it out again; if it still differs, the list was tampered with: tell the "
            "other sites",
        )
    _record(directory, [peer])
    return peer


def confirm_shown(directory: Path, shown: PeersView) -> tuple[Peer, ...]:
    """Record every unconfirmed peer of a view as confirmed, after a person compared them one by one.

    Args:
        directory: The site's directory.
        shown: The view.

    Returns:
        The confirmed peers.

    Raises:
        InvalidInput: If a site has a changed key, another site's key or several keys. Such a site must be confirmed by
            name.
    """
    wanted = [known.peer for known in shown.with_trust(PeerTrust.NOT_CONFIRMED)]
    doubtful = {known.peer.site for known in shown.peers if known.trust not in _PLAIN}
    doubtful |= {peer.site for peer in wanted if sum(peer.site == other.site for other in wanted) > 1}
    if doubtful:
        raise InvalidInput(
            "peers to confirm all at once",
            value=sorted(doubtful),
            limit="peers with one key each, which has not changed",
            remedy="compare fingerprints with each of these hospitals, then `consilium site peers --confirm NAME`",
        )
    _record(directory, wanted)
    return tuple(wanted)


def distrust(directory: Path, site: str) -> None:
    """Withdraw the confirmation of a hospital's key. It takes effect at once in a running worker.

    Args:
        directory: The site's directory.
        site: Name of the peer.
    """
    config = load_site(directory)
    with open_books(config) as ledger:
        ledger.distrust_peer(_study(config), site)


def note_offered(directory: Path, peers: Sequence[Peer], *, study: str, ledger: SiteLedger) -> None:
    """Store those peers in an offer whose keys nobody at this site has confirmed, so that they can be shown.

    The newest :data:`MAX_OFFERED` keys are stored. If the file cannot be written, nothing is stored and the site still
    answers.

    Args:
        directory: The site's directory.
        peers: Peers of the offer.
        study: Id of the study.
        ledger: The site's ledger.
    """
    confirmed = ledger.peers(study)
    unknown = [peer for peer in peers if confirmed.get(peer.site) != peer.key and peer.key != ledger.public_key]
    try:
        before = _offered(directory, study)
    except InvalidInput:  # the file is damaged; it is only shown to people, so it can be replaced
        before = ()
    named = dict.fromkeys((*before, *unknown))
    if len(named) == len(before):
        return
    kept = OfferedPeers(study, tuple(named)[-MAX_OFFERED:])
    try:
        write_atomically(directory / OFFERED, (json.dumps(kept.to_json()) + "\n").encode(), mode=0o600)
    except OSError as error:
        log.warning("event=peers-not-noted cause=%s", type(error).__name__)


def _of_study(listed: Peers, study: str) -> Peers:
    if listed.study != study:
        raise InvalidInput(
            "study of the list of peers",
            value=listed.study[:16],
            limit=f"{study[:16]}, this site's study",
            remedy="ask for this study's list",
        )
    return listed


_PLAIN = (PeerTrust.CONFIRMED, PeerTrust.NOT_CONFIRMED)


def _view(config: SiteConfig, ledger: SiteLedger) -> PeersView:
    study = config.load_study()
    confirmed, own = ledger.peers(study.id), Peer(config.site, ledger.public_key)
    heard: dict[Peer, list[str]] = {Peer(site, key): ["confirmed here"] for site, key in confirmed.items()}
    listed = config.root / LISTED
    for peer in _of_study(read_peers(listed), study.id).peers if listed.exists() else ():
        heard.setdefault(peer, []).append("the consortium's list")
    for peer in _offered(config.root, study.id):
        heard.setdefault(peer, []).append("an offer")
    heard.pop(own, None)
    known = (KnownPeer(peer, _trust_in(peer, own, confirmed), tuple(ways)) for peer, ways in heard.items())
    ordered = sorted(known, key=lambda one: (one.peer.site, one.trust is not PeerTrust.CONFIRMED))
    return PeersView(study.id, own, study.privacy.sealed, study.privacy.quorum, tuple(ordered))


def _trust_in(peer: Peer, own: Peer, confirmed: dict[str, str]) -> PeerTrust:
    if peer.site == own.site or peer.key == own.key:
        return PeerTrust.NOT_OURS
    if confirmed.get(peer.site) == peer.key:
        return PeerTrust.CONFIRMED
    if peer.key in confirmed.values():
        return PeerTrust.KEY_OF_ANOTHER
    return PeerTrust.KEY_CHANGED if peer.site in confirmed else PeerTrust.NOT_CONFIRMED


def _record(directory: Path, peers: Sequence[Peer]) -> None:
    config = load_site(directory)
    study = joined_study(config)
    for peer in peers:
        check_other(directory, peer.site)
    with open_books(config) as ledger:
        if not ledger.has_consent(study.id):
            raise consent_missing(study)
        for peer in peers:
            ledger.confirm_peer(study.id, peer)


def _study(config: SiteConfig) -> str:
    return config.load_study().id


def _offered(directory: Path, study: str) -> tuple[Peer, ...]:
    """Return the peers named in offers of this study so far."""
    path = directory / OFFERED
    try:
        offered = OfferedPeers.from_json(parse_json(path.read_bytes(), what="peers that offers named"))
    except FileNotFoundError:
        return ()
    except (OSError, InvalidInput) as error:
        raise InvalidInput(
            "list of the peers that offers named cannot be read",
            value=str(path),
            remedy="delete the file: later offers name these peers again",
        ) from error
    return offered.peers if offered.study == study else ()
