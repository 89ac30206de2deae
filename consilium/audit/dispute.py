"""Judges whether each site sent an honest code in one draw of a sealed sum, from signed masked codes and mask keys.

`consilium dispute judge` calls it. A draw is one attempt at a sealed sum. The rules are applied in this order:

1. The roster must be real: every member's mask key is signed for this draw by the identity key that the auditor has
   compared by fingerprint with that hospital. Otherwise nothing is judged.
2. A masked code counts only with its site's signature for this roster and query. A site therefore cannot deny what it
   sent, and neither the server nor another site can invent a masked code for it.
3. A disclosed private key counts only if the site signed the disclosure for this draw and auditor. If the roster has
   another public key for the site, the disclosure is false, and its signature proves that the site made it.
4. A site's part is its code plus its noise share: its masked code minus its masks. Each mask follows from the key of
   either of the two sites, so a site that disclosed nothing can still be judged if all others disclosed.
5. A part is outside if its norm is above the bound for honest codes with noise, in one query or in all together. For an
   honest site this happens with probability at most :data:`~common.privacy.shares.FALSE_ALARM`. A part within the bound
   is not proven honest, because noise hides a change of its own size.

The signed judgement contains a verdict for each site, but no norm and no code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from common.disclosure import SealedDisclosure
from common.document import Count, Document, OneOf, Sha256, StoredDocument
from common.errors import InvalidInput, Refused
from common.evidence import DrawEvidence, is_word_of
from common.ledger.charges import SiteName
from common.ledger.keys import Signed, public_hex, signing_public_key
from common.ledger.rows import Time
from common.masking import MAX_MEMBERS, pair_mask, unconfirmed
from common.privacy.shares import FALSE_ALARM, norm_within, site_bound, unmasked

PARTS = ("within", "outside", "unknown")
"""Findings about a site's part (its code plus noise share), compared with the bound for honest sites. ``unknown``:
neither the site nor all other sites have disclosed their mask keys.
"""
DISCLOSURES = ("true", "false", "none")
"""Findings about a site's disclosure. ``false``: its key is not the key that the site signed for this draw."""
WORDS = ("signed", "none")
"""Whether a site sent a signed masked code for every query. ``none``: it sent nothing, so the draw is incomplete."""


@dataclass(frozen=True, slots=True)
class SiteFinding(Document):
    """The findings about one site.

    Attributes:
        site: Name of the site.
        word: Whether it sent a signed masked code for every query.
        disclosure: Whether it disclosed a true key, a false key or none.
        part: Whether its part (code plus noise share) is within the bound for honest sites, outside it, or unknown.
    """

    site: SiteName
    word: Annotated[str, OneOf("word of a site", WORDS)]
    disclosure: Annotated[str, OneOf("disclosure of a site", DISCLOSURES)]
    part: Annotated[str, OneOf("part of a site", PARTS)]

    @property
    def blamed(self) -> bool:
        """True if the site's code plus noise share is larger than any honest site's, or its disclosed key is false."""
        return self.part == "outside" or self.disclosure == "false"


@dataclass(frozen=True, slots=True)
class Judgement(Signed, StoredDocument):
    """The auditor's signed judgement of one draw (attempt at a sealed sum).

    Attributes:
        study: Id of the study.
        roster: Id of the draw's roster.
        evidence: SHA-256 of the evidence that was judged.
        auditor: The auditor's sealing key.
        spoiled: True if the sum of some query has a larger norm than honest sites can cause.
        findings: The findings about each site.
        time_utc: Time of the judgement.
        signature: The auditor's signature.
    """

    DOMAIN: ClassVar = b"consilium/judgement/v1"
    SCHEMA: ClassVar = ("judgement of a draw", 1)

    study: Sha256
    roster: Sha256
    evidence: Sha256
    auditor: Sha256
    spoiled: bool
    findings: Annotated[tuple[SiteFinding, ...], Count("sites of a judgement", least=2, most=MAX_MEMBERS)]
    time_utc: Time
    signature: str = ""

    @property
    def blamed(self) -> tuple[str, ...]:
        """Names of the sites with a finding against them."""
        return tuple(finding.site for finding in self.findings if finding.blamed)


def judge(
    evidence: DrawEvidence,
    disclosures: Sequence[SealedDisclosure],
    *,
    identities: Mapping[str, str],
    auditor: X25519PrivateKey,
    now: str,
) -> tuple[Judgement, tuple[str, ...]]:
    """Judge one draw (attempt at a sealed sum) from masked codes and disclosures, by the module's rules 1 to 5.

    Args:
        evidence: The draw's roster, queries and signed masked codes, from the server.
        disclosures: Disclosures that sites sent to this auditor. Those of other draws, and replayed or forged ones, are
            refused.
        identities: Ed25519 key in hex by site, compared by fingerprint with each hospital.
        auditor: The key to which the disclosures were sealed.
        now: Time of the judgement, UTC, ISO 8601.

    Returns:
        The unsigned judgement, and sentences about doubts that the auditor should investigate.

    Raises:
        InvalidInput: If other identities signed the roster, a masked code is not signed by its site, or a disclosure is
            for another draw or auditor, occurs twice, or is not signed by its site.
    """
    roster = evidence.roster
    if unproven := unconfirmed(roster, me="", peers=identities):
        raise InvalidInput(
            "sites in the roster of the evidence whose mask key is not signed with their identity key",
            value=list(unproven),
            limit="none, because a site signs its mask keys with its identity key in the list of peers",
            remedy="give the list that `consilium dispute evidence` wrote beside the evidence, which has revoked "
            "hospitals too; if it is that list, it may be wrong: ask these hospitals for the fingerprint of their key",
        )
    words = _masked_codes(evidence, identities)
    keys, false, doubts = _keys(evidence, disclosures, identities, auditor=auditor)
    findings = []
    for site in roster.sites:
        part = _part(evidence, site, words, keys) if site in words else None
        findings.append(
            SiteFinding(
                site=site,
                word="signed" if site in words else "none",
                disclosure="true" if site in keys else "false" if site in false else "none",
                part="unknown" if part is None else "within" if part else "outside",
            )
        )
    judgement = Judgement(
        study=roster.study,
        roster=roster.id,
        evidence=evidence.id,
        auditor=public_hex(auditor),
        spoiled=_spoiled(evidence, words),
        findings=tuple(findings),
        time_utc=now,
    )
    return judgement, tuple(doubts)


def _masked_codes(evidence: DrawEvidence, identities: Mapping[str, str]) -> dict[str, dict[str, NDArray[np.uint64]]]:
    """Return each site's masked codes by query, after checking their signatures (rule 2)."""
    queries = {query.id: query for query in evidence.queries}
    found: dict[str, dict[str, NDArray[np.uint64]]] = {}
    for sent in evidence.sites:
        of_site = {}
        for word in sent.words:
            of = {"roster": evidence.roster.id, "query": word.query, "site": sent.site}
            values = word.values
            known = queries.get(word.query)
            if known is None or values.shape != (known.mechanism.dimension,):
                raise InvalidInput(
                    f"masked code of {sent.site}: its query",
                    value=word.query[:16],
                    limit="a query of the disputed draw (one attempt at a sealed sum), and a code of its length",
                )
            if not is_word_of(values, word.signature, identity=identities[sent.site], **of):
                raise InvalidInput(
                    f"masked code of {sent.site}",
                    limit="a masked code that this site signed for the disputed draw (one attempt at a sealed sum)",
                )
            of_site[word.query] = values
        if of_site.keys() != queries.keys():
            raise InvalidInput(
                f"number of masked codes of {sent.site}",
                value=len(of_site),
                limit=f"{len(queries)}, one for each query",
            )
        found[sent.site] = of_site
    return found


def _keys(
    evidence: DrawEvidence,
    disclosures: Sequence[SealedDisclosure],
    identities: Mapping[str, str],
    *,
    auditor: X25519PrivateKey,
) -> tuple[dict[str, X25519PrivateKey], set[str], list[str]]:
    """Return private keys by site, sites that disclosed a false key, and doubts about identities (rule 3)."""
    members = {member.site: member for member in evidence.roster.members}
    keys: dict[str, X25519PrivateKey] = {}
    false: set[str] = set()
    doubts: list[str] = []
    for sealed in disclosures:
        site = sealed.site
        ask = f"ask {site} to make a disclosure about draw {evidence.roster.id[:12]} for this auditor's key"
        if site not in members:
            raise InvalidInput(
                f"disclosure of {site}",
                limit=f"a site of the disputed draw (one attempt at a sealed sum): {', '.join(sorted(members))}",
            )
        if sealed.roster != evidence.roster.id:
            raise InvalidInput(
                f"draw (one attempt at a sealed sum) of the disclosure of {site}",
                value=sealed.roster,
                limit=f"{evidence.roster.id}, the draw of the evidence",
                remedy=ask,
            )
        if sealed.auditor != public_hex(auditor):
            raise InvalidInput(f"auditor of the disclosure of {site}", limit="this auditor", remedy=ask)
        if site in keys or site in false:
            raise InvalidInput(f"disclosure of {site} occurs twice", limit="one for each site")
        opened = sealed.opened(auditor)
        if not opened.is_genuine(signing_public_key(identities[site])):
            raise InvalidInput(f"disclosure of {site}", limit="a disclosure that this site signed")
        private = X25519PrivateKey.from_private_bytes(bytes.fromhex(opened.key))
        if public_hex(private) == members[site].mask.key:
            keys[site] = private
        else:
            false.add(site)
        doubts += [
            f"{opened.site} has confirmed another key of {peer.site} than the one given here"
            for peer in opened.peers
            if peer.site in identities and identities[peer.site] != peer.key
        ]
    return keys, false, doubts


def _part(
    evidence: DrawEvidence,
    site: str,
    words: Mapping[str, Mapping[str, NDArray[np.uint64]]],
    keys: Mapping[str, X25519PrivateKey],
) -> bool | None:
    """Return whether a site's code plus noise share is within the bounds for honest sites (rules 4 and 5).

    None if a mask of the site is unknown, so that its code plus noise share cannot be computed.
    """
    roster = evidence.roster
    by_name = {member.site: member for member in roster.members}
    others = [name for name in roster.sites if name != site]
    if site not in keys and not keys.keys() >= set(others):
        return None
    mechanism, count = evidence.queries[0].mechanism, len(evidence.queries)
    own = site_bound(mechanism, sites=len(roster.members), false_alarm=FALSE_ALARM / (2 * count))
    parts = []
    for query in evidence.queries:
        part = words[site][query.id].copy()
        for other in others:
            me, peer = (site, other) if site in keys else (other, site)
            try:
                mask = pair_mask(
                    roster,
                    me=me,
                    peer=by_name[peer],
                    private=keys[me],
                    query=query.id,
                    dimension=mechanism.dimension,
                )
                part -= mask if me == site else np.uint64(0) - mask  # the two sites use it with opposite signs
            except Refused:  # unusable mask key; an honest site refuses such a roster
                return False
        parts.append(part.view(np.int64))
    together = site_bound(mechanism, sites=len(roster.members), queries=count, false_alarm=FALSE_ALARM / 2)
    return all(norm_within(part, own) for part in parts) and norm_within(np.concatenate(parts), together)


def _spoiled(evidence: DrawEvidence, words: Mapping[str, Mapping[str, NDArray[np.uint64]]]) -> bool:
    """Return whether some query's sum over all sites has a larger norm than honest sites can cause."""
    if words.keys() != set(evidence.roster.sites):
        return False
    for query in evidence.queries:
        total = np.zeros(query.mechanism.dimension, dtype=np.uint64)
        for sent in words.values():
            total += sent[query.id]
        try:
            unmasked(total, query.mechanism, sites=len(words))
        except Refused:
            return True
    return False
