"""Reads the site's own policy, ``site.toml``, and decides whether a batch is what the site consented to.

The worker and all commands of a site read it. The policy contains caps, allow-lists by hash and the server's keys. An
offer is decided before any inference, from the offer, the consented study, the policy and the site's own ledger.
Patients' data are never used, so participation reveals nothing about them. The module refuses unknown keys in the file,
and every query that differs from what the consented study describes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

from client.data.layouts import DatasetSettings, read_settings
from common.canonical import check_hash, check_name, check_pool, check_schema
from common.config import Study, load_study
from common.errors import InvalidInput
from common.ledger.keys import sealing_public_key, signing_public_key
from common.messages import Offer
from common.privacy.mechanism import AccountantName, QuerySpec, Relation, Unit
from common.protocols.site_protocol import SiteProtocol, site_protocol
from common.public_keys import check_agreement_key, check_identity_key
from common.reading import MAX_TOML_BYTES, parse_toml, parsing, read_text
from common.sections import check_ranges, meant, read_section
from common.stated_budget import StatedBudget
from common.study_mechanism import study_mechanism

SITE_SCHEMA = 1
LEDGER_FILE = "site-ledger.sqlite"


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a site knows of the server. These values come with the startup kit, never over Flower.

    Attributes:
        sealing_key: X25519 public key, in hex, to which codes are encrypted.
        signing_key: Ed25519 public key, in hex, of the server's ledger.
        objects_url: Address of the public objects.
        superlink: Address of Flower's SuperLink.
        root_certificates: File of the certificate authority.
        more_signing_keys: Further keys that are accepted while the server's signing key is changed, so that no receipt
            is missed. A key that is removed is no longer trusted from the next start.
        ledger: Id of the server's ledger; an offer that names another one is declined. Empty if the kit is of an
            earlier version.
    """

    sealing_key: str
    signing_key: str
    objects_url: str
    superlink: str
    root_certificates: str
    more_signing_keys: tuple[str, ...] = ()
    ledger: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "more_signing_keys", tuple(self.more_signing_keys))
        checks = [("sealing_key", self.sealing_key, check_agreement_key)]
        checks += [("signing_key", self.signing_key, check_identity_key)]
        checks += [("more_signing_keys", key, check_identity_key) for key in self.more_signing_keys]
        for name, value, check in checks:
            try:
                check(value)
            except InvalidInput as error:
                raise InvalidInput(f"server.{name}", value=value, limit=error.limit) from error
        host, _, port = self.superlink.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise InvalidInput(
                "server.superlink", value=self.superlink, limit="HOST:PORT", remedy="copy it from the kit's kit.json"
            )
        if not self.objects_url.startswith("https://"):
            raise InvalidInput("server.objects_url", value=self.objects_url, limit="an https:// address")

    @property
    def sealing_public_key(self) -> X25519PublicKey:
        """The key to which codes are sealed."""
        return sealing_public_key(self.sealing_key)

    @property
    def signing_keys(self) -> tuple[str, ...]:
        """Every key with which the server may sign, in hex, the current one first."""
        return (self.signing_key, *self.more_signing_keys)

    @property
    def signing_public_keys(self) -> tuple[Ed25519PublicKey, ...]:
        """The keys of :attr:`signing_keys`, in the form that checks signatures."""
        return tuple(map(signing_public_key, self.signing_keys))


@dataclass(frozen=True, slots=True)
class Caps(StatedBudget):
    """The site's own limits for its patient pool.

    The site checks them in its own ledger, so a wrong or dishonest server cannot exceed them.

    Attributes:
        epsilon: ε that the pool may ever spend.
        delta: δ at which ε is computed.
        accountant: Accountant by which the site decides.
        unit: Unit of privacy.
        relation: Neighbouring relation.
        queries_per_day: Number of queries that the site answers in a day.
    """

    epsilon: float
    delta: float
    accountant: AccountantName = AccountantName.EXACT
    unit: Unit = Unit.HOSPITAL
    relation: Relation = Relation.REPLACE_ONE
    queries_per_day: int = 1000

    def __post_init__(self) -> None:
        self._check_budget("caps")
        check_ranges(self, {"queries_per_day": (1, 1_000_000)}, where="caps")


@dataclass(frozen=True, slots=True)
class AllowLists:
    """Content hashes of the objects that the site accepts. They restrict what its consent to a study allows.

    An empty list allows everything that the study uses.

    Attributes:
        studies: Ids of studies.
        codecs: Hashes of codecs.
        volumes: Hashes of public volumes.
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
        """Accept or decline an offer by comparing its hashes with these lists.

        Args:
            offer: The offer.

        Returns:
            ``accepted``, or the reason for declining it.
        """
        if self.studies and offer.study not in self.studies:
            return "unknown-study"
        if self.codecs and any(query.codec not in self.codecs for query in offer.queries):
            return "wrong-codec"
        if self.volumes and any(volume not in self.volumes for query in offer.queries for volume in query.volumes):
            return "unavailable"
        return "accepted"


@dataclass(frozen=True, slots=True)
class SharingPolicy:
    """What a site lets the server's operator know besides its answers; by default nothing.

    Attributes:
        case_counts: If true, `site cases --for-server` prints how many cases the training used and left out.
        status: If true, every reply to receipts contains the site's status report (``client.worker.shared_status``).
    """

    case_counts: bool = False
    status: bool = False


@dataclass(frozen=True, slots=True)
class SiteConfig:
    """A hospital's ``site.toml``.

    Attributes:
        site: Name of the site.
        pool: Permanent name of the patient pool, to which budgets belong.
        data: Folder of the dataset.
        study: File of the study that the site consented to.
        books: Directory, relative to the site's directory, with the pool's *books*: the pool's name and caps, its
            ledger with the ledger's key and standing (a file that shows whether the ledger is an older copy), and the
            assignment of patients to voters. A pool that takes part in several studies has its books in the directory
            of the first study, and the directories of the later studies name that directory here.
        server: What the site knows of the server.
        caps: The pool's own limits.
        allow: Hashes of the studies, codecs and volumes that this site accepts.
        share: What the server's operator may know.
        dataset: How the data are read.
        root: The site's directory.
        holder: Name of the site that keeps the pool's ledger; by default this site.
    """

    site: str
    pool: str
    data: str
    server: ServerFacts
    caps: Caps
    allow: AllowLists = AllowLists()
    study: str = "study.toml"
    dataset: DatasetSettings = field(default_factory=DatasetSettings)
    share: SharingPolicy = SharingPolicy()
    root: Path = field(default=Path())
    books: str = "."
    holder: str = ""

    def __post_init__(self) -> None:
        if not self.holder:
            object.__setattr__(self, "holder", self.site)
        check_name(self.site, what="site in site.toml")
        check_name(self.holder, what="site that keeps the pool's books")
        check_pool(self.pool, what="pool in site.toml")

    def path(self, name: str) -> Path:
        """Return a path relative to the site's directory.

        Args:
            name: The relative path.

        Returns:
            The path.
        """
        return self.root / name

    def load_study(self) -> Study:
        """Read the study in the site's directory.

        Returns:
            The study.

        Raises:
            InvalidInput: If the file is missing or not a study.
        """
        return load_study(self.path(self.study))

    @property
    def books_dir(self) -> Path:
        """Directory that contains the pool's ledger: the site's own, or that of the site whose pool it joined."""
        return self.path(self.books)

    @property
    def ledger_file(self) -> Path:
        """File of the pool's ledger at this hospital. All studies of the pool share this one ledger."""
        return self.books_dir / LEDGER_FILE

    @property
    def joined(self) -> bool:
        """True if another directory keeps this site's ledger."""
        return self.books != "."


def load_site(directory: Path) -> SiteConfig:
    """Read ``site.toml`` in a site's directory.

    The key ``books`` names the directory of another site of the same pool, which keeps the pool's ledger. A file with
    this key takes pool and caps from the ``site.toml`` in that directory and must not state its own, so that one ledger
    has one set of caps.

    Args:
        directory: The site's directory.

    Returns:
        The policy.

    Raises:
        InvalidInput: If the file cannot be read, or has an unknown, missing or invalid key.
    """
    path = directory / "site.toml"
    try:
        return _load_site(path, directory)
    except InvalidInput as error:
        if "site.toml" in error.what:
            raise
        remedy = error.remedy or f"correct it in {path}; `consilium site doctor` checks it"
        raise InvalidInput(f"{path}: {error.what}", value=error.value, limit=error.limit, remedy=remedy) from error


def _load_site(path: Path, directory: Path) -> SiteConfig:
    remedy = "check the path and who may read it; `consilium site init` makes a site"
    text = read_text(path, what="site.toml", most_bytes=MAX_TOML_BYTES, remedy="save it in UTF-8", absent=remedy)
    document = parse_toml(text, what="site.toml")
    check_schema("site.toml", document.pop("schema", None), known=SITE_SCHEMA)
    dataset = read_settings(document, root=directory)
    owned = _owned(document, directory)
    known = {each.name for each in fields(SiteConfig)} - {"dataset", "root", "holder"}
    unknown = sorted(document.keys() - known)
    missing = sorted({"site", "pool", "data", "server", "caps"} - document.keys() - owned.keys())
    if unknown or missing:
        limit = ", ".join(sorted(known))
        if unknown:
            raise InvalidInput("unknown key", value=unknown[0], limit=limit, remedy=meant(unknown[0], known))
        raise InvalidInput(
            "these keys are missing from site.toml",
            value=missing,
            limit=limit,
            remedy="add them, as `consilium site init` writes them in a new site.toml; docs/configuration.md lists all "
            "keys",
        )
    server = read_section(ServerFacts, document.pop("server"), where="server")
    owned = owned or {"caps": read_section(Caps, document.pop("caps"), where="caps")}
    allow = read_section(AllowLists, document.pop("allow", {}), where="allow")
    share = read_section(SharingPolicy, document.pop("share", {}), where="share")
    for key, value in document.items():
        if not isinstance(value, str):
            raise InvalidInput(key, value=value, limit="a text in quotes")
    facts = {**document, **owned}
    return SiteConfig(**facts, server=server, allow=allow, dataset=dataset, share=share, root=directory)


def _owned(document: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the values that belong to the pool, if ``site.toml`` names the directory of another site as ``books``.

    They are the pool's name, its caps and the name of the site that keeps its ledger, all read from ``site.toml`` in
    that directory. The result is empty without the key ``books``.
    """
    books = document.get("books", ".")
    if not isinstance(books, str) or books == ".":
        return {}
    stated = sorted({"pool", "caps"} & document.keys())
    if stated:
        raise InvalidInput(
            f"{' and '.join(stated)} in site.toml beside books",
            limit=f"these keys only in {books}/site.toml, because all studies of a pool have the same caps",
            remedy="remove them from this site.toml",
        )
    with parsing(
        "books in site.toml cannot be read", value=books, limit="the directory that contains the pool's ledger"
    ):
        owner = load_site(directory / books)
    if owner.joined:
        raise InvalidInput(
            "books in site.toml",
            value=books,
            limit="the directory that contains the pool's ledger, not one that names a further directory as books",
        )
    return {"pool": owner.pool, "caps": owner.caps, "holder": owner.site}


@dataclass(frozen=True, slots=True)
class Consent:
    """The study to which the site consented, with the noise and the protocol that follow from it.

    They are computed once, because calibrating the noise is slow.

    Attributes:
        study: The study.
        noise_std: Standard deviation of the noise, in grid steps of 2⁻¹⁶ (codes are integers in these steps).
        radius_int: Clipping norm C, in the same steps.
        protocol: The site's half of the query protocol.
        colluders: Number of hospitals assumed to collude with the server, in a study with sealed sums; otherwise None.
    """

    study: Study
    noise_std: Fraction
    radius_int: int
    protocol: SiteProtocol
    colluders: int | None = None

    @classmethod
    def of(cls, study: Study) -> Consent:
        """Compute noise, clipping norm and protocol of a study to which the site consented.

        Args:
            study: The study.

        Returns:
            The study with these values.
        """
        mechanism = study_mechanism(study, dimension=1)
        return cls(study, mechanism.noise_std, mechanism.radius_int, site_protocol(study), mechanism.colluders)


def review(offer: Offer, consent: Consent) -> str:
    """Decide whether every query of an offer is what the consented study describes.

    Budget and daily cap are not checked here; the site's ledger checks them.

    Args:
        offer: The offer.
        consent: The consented study.

    Returns:
        ``accepted``, or the reason for declining it.
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
        and mechanism.noise_std == consent.noise_std  # with more noise a query costs less, so more could be asked
    )
    return "accepted" if sound else "wrong-mechanism"
