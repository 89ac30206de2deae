"""The site's own policy: what it consented to, and whether it accepts a batch.

``site.toml`` is frozen and validated: caps, allow-lists by hash, and the server's keys. A decision is made before any
inference, from the offer, the consented study, the site's policy and its own ledger alone: patients' data never enters
it, so participation says nothing about them. Refuses every query that is not what the consented study describes.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

from client.data.layouts import DatasetSettings, read_settings
from common.canonical import check_hash, check_name, check_pool, check_schema
from common.config import StatedBudget, Study
from common.errors import InvalidInput
from common.ledger.keys import signing_public_key
from common.messages import Offer
from common.privacy.mechanism import AccountantName, QuerySpec, Relation, Unit
from common.protocols.base import SiteProtocol, site_protocol
from common.sections import read_section
from common.study_mechanism import study_mechanism

SITE_SCHEMA = 1
LEDGER_FILE = "site-ledger.sqlite"


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a site knows of the server: its keys in hex (Ed25519 of the ledger, X25519 for codes), and where public
    objects are. These come with the startup kit, never over Flower.

    ``more_signing_keys`` are accepted beside ``signing_key``: while the server's key is being changed both the old and
    the new one stand here, so that no receipt is missed. Whoever takes a key out stops trusting it at the next start.
    """

    sealing_key: str
    signing_key: str
    objects_url: str
    superlink: str
    root_certificates: str
    more_signing_keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "more_signing_keys", tuple(self.more_signing_keys))
        named = [(name, getattr(self, name)) for name in ("sealing_key", "signing_key")]
        for name, value in (*named, *(("more_signing_keys", key) for key in self.more_signing_keys)):
            if len(value) != 64 or set(value) - set("0123456789abcdef"):
                raise InvalidInput(f"server.{name}", value=value, limit="64 hex digits")
        if not self.objects_url.startswith("https://"):
            raise InvalidInput("server.objects_url", value=self.objects_url, limit="an https:// address")

    @property
    def sealing_public_key(self) -> X25519PublicKey:
        return X25519PublicKey.from_public_bytes(bytes.fromhex(self.sealing_key))

    @property
    def signing_public_key(self) -> Ed25519PublicKey:
        return signing_public_key(self.signing_key)

    @property
    def signing_public_keys(self) -> tuple[Ed25519PublicKey, ...]:
        """Every key the server may sign receipts with, the current one first."""
        keys = (self.signing_key, *self.more_signing_keys)
        return tuple(map(signing_public_key, keys))


@dataclass(frozen=True, slots=True)
class Caps(StatedBudget):
    """The most this site's patient pool may ever spend, and how much it answers in a day; its own limits, checked in
    its own ledger whatever the server's says."""

    epsilon: float
    delta: float
    accountant: AccountantName = AccountantName.EXACT
    unit: Unit = Unit.HOSPITAL
    relation: Relation = Relation.REPLACE_ONE
    queries_per_day: int = 1000

    def __post_init__(self) -> None:
        self._check_budget("caps")
        if not 1 <= self.queries_per_day <= 1_000_000:
            raise InvalidInput("caps.queries_per_day", value=self.queries_per_day, limit="1 to 1000000")


@dataclass(frozen=True, slots=True)
class AllowLists:
    """``[allow]``: hashes the site restricts itself to, beyond its consent to the study. An absent or empty list allows
    whatever the consented study implies: any codec within the study's dimension, any public volume, the study itself.
    """

    studies: tuple[str, ...] = ()
    codecs: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("studies", "codecs", "volumes"):
            hashes = tuple(getattr(self, name))
            object.__setattr__(self, name, hashes)
            for value in hashes:
                try:
                    check_hash(value)
                except InvalidInput as error:
                    raise InvalidInput(
                        f"allow.{name}", value=value, limit="SHA-256 in 64 lower-case hex digits"
                    ) from error

    def review(self, offer: Offer) -> str:
        """``"accepted"``, or the word a declined offer is answered with. Decided from hashes alone."""
        if self.studies and offer.study not in self.studies:
            return "unknown-study"
        if self.codecs and any(query.codec not in self.codecs for query in offer.queries):
            return "wrong-codec"
        if self.volumes and any(volume not in self.volumes for query in offer.queries for volume in query.volumes):
            return "unavailable"
        return "accepted"


@dataclass(frozen=True, slots=True)
class Sharing:
    """``[share]``: what a site lets the server's operator know beyond its answers. Nothing, unless it says so.

    ``status`` goes out with every reply to receipts (:func:`client.worker.shared_status`).
    """

    case_counts: bool = False
    status: bool = False


@dataclass(frozen=True, slots=True)
class SiteConfig:
    """A hospital's ``site.toml``. ``pool`` is the stable name of its patient pool, to which budgets belong.

    ``dataset`` says how its data is to be read: ``[dataset]`` layout and patients, ``[labels]``, ``[channels]``.
    ``books`` is the directory, relative to this one, that keeps the pool's books: the site ledger with its key and
    standing, pool name, caps, and how patients were dealt to voters. A site that joined another study of its pool
    keeps none of its own; ``holder`` is then the site that does, as its own site.toml names it.
    """

    site: str
    pool: str
    data: str
    server: ServerFacts
    caps: Caps
    allow: AllowLists = AllowLists()
    study: str = "study.toml"
    dataset: DatasetSettings = field(default_factory=DatasetSettings)
    share: Sharing = Sharing()
    root: Path = field(default=Path())
    books: str = "."
    holder: str = ""

    def __post_init__(self) -> None:
        if not self.holder:
            object.__setattr__(self, "holder", self.site)
        check_name(self.site, what="site in site.toml")
        check_name(self.holder, what="site that holds the books")
        check_pool(self.pool, what="pool in site.toml")

    def path(self, name: str) -> Path:
        """``name`` relative to the site's directory."""
        return self.root / name

    @property
    def books_dir(self) -> Path:
        """Where the pool's books lie: this directory, or the one whose pool this site joined with."""
        return self.path(self.books)

    @property
    def ledger_file(self) -> Path:
        """The one site ledger of the pool, whichever study's directory this is."""
        return self.books_dir / LEDGER_FILE

    @property
    def joined(self) -> bool:
        """Whether another directory keeps this site's books."""
        return self.books != "."


def load_site(directory: Path) -> SiteConfig:
    """Read ``site.toml`` in a site's directory; unknown keys are refused.

    One that names ``books`` takes pool and caps from the site.toml there and may not state its own: two sets of caps on
    one ledger would be in force by turns.
    """
    path = directory / "site.toml"
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or "not UTF-8"
        remedy = "check the path and who may read it; `consilium site init` makes a site"
        raise InvalidInput(f"site.toml cannot be read ({why})", value=str(path), remedy=remedy) from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"site.toml is not TOML ({error})") from error
    check_schema("site.toml", document.pop("schema", None), known=SITE_SCHEMA)
    dataset = read_settings(document, root=directory)
    owned = _owned(document, directory)
    known = {"site", "pool", "data", "study", "books", "server", "caps", "allow", "share"}
    unknown = sorted(document.keys() - known)
    missing = sorted({"site", "pool", "data", "server", "caps"} - document.keys() - owned.keys())
    if unknown or missing:
        raise InvalidInput("keys of site.toml", value=unknown or missing, limit=", ".join(sorted(known)))
    server = read_section(ServerFacts, document.pop("server"), where="server")
    owned = owned or {"caps": read_section(Caps, document.pop("caps"), where="caps")}
    allow = read_section(AllowLists, document.pop("allow", {}), where="allow")
    share = read_section(Sharing, document.pop("share", {}), where="share")
    if not all(isinstance(value, str) for value in document.values()):
        raise InvalidInput("site, pool, data, study and books in site.toml", limit="strings")
    facts = {**document, **owned}
    return SiteConfig(**facts, server=server, allow=allow, dataset=dataset, share=share, root=directory)


def _owned(document: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Pool, caps and holder from the site.toml that ``books`` leads to; nothing for a site with books of its own."""
    books = document.get("books", ".")
    if not isinstance(books, str) or books == ".":
        return {}
    stated = sorted({"pool", "caps"} & document.keys())
    if stated:
        raise InvalidInput(
            f"{' and '.join(stated)} in site.toml beside books",
            limit=f"stated in {books}/site.toml alone",
            remedy="take them out here; the caps are the pool's, whatever the study",
        )
    owner = load_site(directory / books)
    if owner.joined:
        raise InvalidInput(
            "books in site.toml", value=books, limit="the directory that keeps the books itself, not one that joined"
        )
    return {"pool": owner.pool, "caps": owner.caps, "holder": owner.site}


@dataclass(frozen=True, slots=True)
class Consent:
    """The consented study, how it asks and with which noise; built once, since calibration is the slow part."""

    study: Study
    noise_std: Fraction
    radius_int: int
    protocol: SiteProtocol
    colluders: int | None = None

    @classmethod
    def of(cls, study: Study) -> Consent:
        mechanism = study_mechanism(study, dimension=1)
        return cls(study, mechanism.noise_std, mechanism.radius_int, site_protocol(study), mechanism.colluders)


def review(offer: Offer, consent: Consent) -> str:
    """``"accepted"`` if every query of ``offer`` is what the consented study describes, else the word for why not.

    Budget and daily caps are the site ledger's to check; this looks at the study and the queries only.
    """
    if offer.study != consent.study.id:
        return "unknown-study"
    if not offer.queries or len({query.id for query in offer.queries}) != len(offer.queries):
        return "malformed"
    if (offer.draw is not None) != consent.study.privacy.sealed:
        return "wrong-mechanism"
    for query in offer.queries:
        reason = _review_query(query, consent)
        if reason != "accepted":
            return reason
    return "accepted"


def _review_query(query: QuerySpec, consent: Consent) -> str:
    study, mechanism = consent.study, query.mechanism
    if query.edition != study.privacy.edition:
        return "wrong-edition"
    fits = mechanism.dimension <= study.codec.max_dimension * len(query.volumes)
    if not consent.protocol.describes(query) or not fits or query.weights != "codec":
        return "wrong-codec"
    sound = (
        mechanism.radius_int == consent.radius_int
        and mechanism.voters_per_site == study.privacy.voters_per_site
        and mechanism.colluders == consent.colluders
        and mechanism.noise_std == consent.noise_std  # more would be charged less, and many more codes be had for it
    )
    return "accepted" if sound else "wrong-mechanism"
