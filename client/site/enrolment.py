"""Sets up a site from the consortium's startup kit: its directory, node key, policy and copy of the study.

`consilium site init` and `site join` call it. Steps:

1. Check the kit, the data folder and the registry of pools.
2. Create the directory with node key, certificate, study and ``site.toml``.
3. Create the pool's ledger for its first study, or join the existing one for a further study.
4. Write the request to the consortium.

Repeating a finished set-up changes nothing. Repeating an interrupted set-up completes it. A set-up that fails leaves
nothing behind. The module refuses a directory that contains another site, missing data, an incomplete kit, and a second
ledger for a pool or for data that already have a ledger on this machine. The node's private key is made here and never
leaves the site; the consortium gets the public key.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from client.data.layouts import LAYOUTS
from client.policy import SITE_SCHEMA, load_site
from client.site.books import STUDIES, forget_joined, note_joined, open_books, site_directories, stated_books
from client.site.node_link import write_link
from client.site.registry import KeptPool, Registry
from common.admission import JoinRequest, KitFacts, read_request, write_request
from common.canonical import sha256_bytes
from common.config import PrivacyConfig, Study, load_study
from common.errors import InvalidInput
from common.objects import all_or_nothing, read_regular, write_atomically
from common.pki import create_node_keys, expires
from common.reading import parse_json, parsing, read_text

REQUEST = "request.json"
MAX_KIT_BYTES = 1 << 20
START = "start.pt"
"""File of the public start (a network trained on public data alone), in the kit and in a site's directory."""
MAX_KIT_FILE_BYTES = 512 << 20
"""Largest file in a kit, enough for the largest network's weights."""
_ANOTHER_KIT = "ask the consortium for a new startup kit"


@dataclass(frozen=True, slots=True)
class SiteKit:
    """The startup kit: the files that the consortium sends to a hospital, from which its site is set up.

    Attributes:
        facts: Content of ``kit.json``.
        root_certificate: Certificate of the study's authority.
        study_file: The study.
        start_file: Public weights from which teachers begin; the file need not exist.
    """

    facts: KitFacts
    root_certificate: Path
    study_file: Path
    start_file: Path

    @classmethod
    def load(cls, directory: Path) -> SiteKit:
        """Read and check a kit.

        Args:
            directory: Folder with ``kit.json``, ``ca.crt`` and ``study.toml``, as regular files.

        Returns:
            The kit.

        Raises:
            InvalidInput: If a part is missing or cannot be read.
        """
        kit_file, certificate, study = (directory / name for name in ("kit.json", "ca.crt", "study.toml"))
        start = directory / START
        try:
            with parsing("kit.json or ca.crt cannot be read", remedy=_ANOTHER_KIT):
                for path in (kit_file, certificate, study, *([start] if os.path.lexists(start) else [])):
                    _received(path)
                text = read_text(kit_file, what="kit.json", most_bytes=MAX_KIT_BYTES)
                facts = KitFacts.from_json(parse_json(text, what="kit.json"))
                expires(certificate)
            _check_start(start, load_study(study))
        except InvalidInput as error:
            wrong = f" ({error.what})" if directory.is_dir() else ""
            raise InvalidInput(
                f"startup kit{wrong}",
                value=str(directory),
                limit="a folder with kit.json, ca.crt, study.toml",
                remedy="unpack the kit that the consortium sent, and give its folder; or ask for a new kit",
            ) from error
        return cls(facts, certificate, study, start_file=start)


def _received(path: Path) -> bytes:
    return read_regular(path, most_bytes=MAX_KIT_FILE_BYTES, received=True)


def start_file(directory: Path) -> Path | None:
    """Return the site's copy of the public start.

    Args:
        directory: The site's directory.

    Returns:
        The file; None if the kit contained none.
    """
    path = directory / START
    return path if path.is_file() else None


def study_start(directory: Path, study: Study) -> Path | None:
    """Find the weights that this site's teachers begin from.

    Args:
        directory: The site's directory.
        study: Its study.

    Returns:
        The file; None if the study has no public start.

    Raises:
        InvalidInput: If the study names weights that teachers begin from, and the site's file is missing or differs.
    """
    _check_start(directory / START, study)
    return start_file(directory)


def _check_start(path: Path, study: Study) -> None:
    """Raise InvalidInput if the study names weights that teachers begin from, and ``path`` does not contain them."""
    named = study.start.weights
    if not named or not study.one_network:
        return
    found = sha256_bytes(_received(path)) if path.is_file() else "no file"
    if found != named:
        raise InvalidInput(
            f"{START}, the network that teachers begin from",
            value=found,
            limit=f"{named}, which the study names",
            remedy=_ANOTHER_KIT,
        )


def start_warning(directory: Path, study: Study) -> str | None:
    """Return a warning if a site's teachers begin from weights that the study does not name.

    A private training's guarantee holds for weights made without the site's patients. The software cannot see how
    weights were made, so people compare their hash.

    Args:
        directory: The site's directory.
        study: Its study.

    Returns:
        The warning; None without a start, or if the study names its hash.
    """
    path = start_file(directory)
    if path is None or (study.start.weights and study.one_network):
        return None
    return (
        f"the study does not record the SHA-256 of {START}, the network that teachers begin from, so only you can "
        f"check it: ask the consortium for this value, and go on only if it is {sha256_bytes(_received(path))}"
    )


def create_site(
    directory: Path,
    *,
    pool: str,
    data: Path,
    kit: SiteKit,
    registry: Registry | None = None,
    forget: Path | None = None,
) -> JoinRequest:
    """Set up a site's directory with its pool's ledger, and write its request to the consortium.

    The caps are set to what the study lets a pool spend in its lifetime.

    Args:
        directory: The site's directory.
        pool: Permanent name of the patient pool.
        data: Folder of the dataset.
        kit: The startup kit.
        registry: Pools with a ledger on this machine; by default the user's.
        forget: Directory of a lost ledger of these patients, whose charges a person decided to forget.

    Returns:
        The request.

    Raises:
        InvalidInput: If the data, the kit, the directory or the pool is refused (see the module's docstring).
    """
    registry = registry or Registry.of_user()
    check_data_folder(data)
    with registry.alone():
        registry.check(pool=pool, data=data, directory=directory, kit=kit.study_file.parent, forget=forget)
        if (directory / "site.toml").exists():
            request = _same_again(directory, kit, pool=pool, data=data)
        else:
            study = load_study(kit.study_file)
            caps = replace(study.privacy, epsilon=study.pool_budget.epsilon)
            text = _site_toml(kit, pool=pool, data=os.path.abspath(data), caps=caps)
            request = _lay_out(directory, kit, text)
        registry.remember(
            KeptPool(pool=pool, data=str(data.resolve()), directory=str(directory.resolve())), forget=forget
        )
    return request


def join_site(
    directory: Path | None, *, kit: SiteKit, existing: Path, data: Path | None = None
) -> tuple[Path, JoinRequest]:
    """Set up a directory for another study of an existing pool.

    Pool, caps, ledger and withdrawals are shared. Node key, study, teachers and worker belong to the new directory.

    Args:
        directory: The new directory; by default ``studies/STUDY`` beside the ledger.
        kit: The startup kit.
        existing: A directory that keeps or has joined the pool's ledger.
        data: Folder of the dataset; by default that of ``existing``.

    Returns:
        The directory and the request.

    Raises:
        InvalidInput: If the directory holds another site, the ledger is missing, or the pool has joined this study
            before.
        LedgerCorrupt: If the ledger must be recovered first.
    """
    first = load_site(existing)
    books = first.books_dir.resolve()
    study = load_study(kit.study_file)
    directory = directory or books / STUDIES / _folder_name(study.name)
    data = data or first.path(first.data)
    check_data_folder(data)
    registry = Registry.of_user()
    with registry.alone():
        if (directory / "site.toml").exists():
            if load_site(directory).books_dir.resolve() != books:
                raise _taken(directory)
            return directory, _same_again(directory, kit, pool=first.pool, data=data)
        forget_joined(books, directory)  # an earlier set-up was interrupted
        _check_not_joined(books, study, kit.facts)
        if not first.ledger_file.exists():
            raise InvalidInput(
                "the site ledger of this patient pool is missing",
                value=str(first.ledger_file),
                remedy="put the ledger back, with its key and its standing (the file site-ledger.standing)",
            )
        open_books(load_site(books)).close()  # an older copy of the ledger is refused here
        text = _site_toml(kit, books=os.path.relpath(books, directory.resolve()), data=os.path.abspath(data))
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        note_joined(books, directory)  # before anything else, so that a withdrawal reaches this directory too
        try:
            request = _lay_out(directory, kit, text)
        except BaseException:
            forget_joined(books, directory)
            raise
        keeper = load_site(books)
        kept = KeptPool(pool=keeper.pool, data=str(keeper.path(keeper.data).resolve()), directory=str(books))
        registry.remember(kept)
    return directory, request


def _folder_name(study: str) -> str:
    """Return a study's name if it is safe as a folder's name; otherwise raise InvalidInput."""
    if study.startswith(".") or not all(c.isascii() and (c.isalnum() or c in "-_.") for c in study):
        raise InvalidInput(
            "the study's name cannot be a folder's name",
            value=study,
            limit="letters, digits, - _ and .",
            remedy="name a folder with --site-dir",
        )
    return study


def _check_not_joined(books: Path, study: Study, kit: KitFacts) -> None:
    for directory in site_directories(books):
        other = load_site(directory)
        if load_study(other.path("study.toml")).id == study.id:
            raise InvalidInput(
                "the study has a directory at this site already", value=str(directory), remedy="use that directory"
            )
        if kit.ledger and kit.ledger == other.server.ledger and kit.signing_key not in other.server.signing_keys:
            raise InvalidInput(
                f"ledger in the startup kit, which the kit of {directory} names for a server with another key",
                value=kit.ledger,
                limit="a different ledger for each server",
                remedy=f"ask both consortia which of them has this ledger; if one server changed its key, list the new "
                f"key in server.more_signing_keys of {directory / 'site.toml'}",
            )


def check_data_folder(data: Path) -> None:
    """Refuse a data folder that does not exist or that this user cannot read.

    Args:
        data: The folder.

    Raises:
        InvalidInput: If the folder does not exist or cannot be read.
    """
    if not data.is_dir():
        raise InvalidInput(
            "folder of the dataset", value=str(data), limit="an existing folder", remedy="check the path"
        )
    if not os.access(data, os.R_OK | os.X_OK):
        raise InvalidInput(
            "folder of the dataset",
            value=str(data),
            limit=f"a folder that user {os.getuid()} can read",
            remedy="let that user read the folder",
        )


def _taken(directory: Path) -> InvalidInput:
    return InvalidInput(
        "the directory already contains a site",
        value=str(directory),
        remedy="choose another directory; for another study of the same patients, run `consilium site join`",
    )


def _same_again(directory: Path, kit: SiteKit, *, pool: str, data: Path) -> JoinRequest:
    """Return the request of the site in a directory, which must be set up from the same kit for the same pool and data.

    Raises InvalidInput otherwise.
    """
    config = load_site(directory)
    same = (
        (config.site, config.pool) == (kit.facts.site, pool)
        and config.server.signing_key == kit.facts.signing_key
        and config.path("study.toml").read_bytes() == kit.study_file.read_bytes()
    )
    if not same:
        raise _taken(directory)
    if config.path(config.data).resolve() != data.resolve():
        raise InvalidInput(
            "folder of the dataset",
            value=str(data),
            limit=f"{config.path(config.data)}, which site.toml in {directory} names",
            remedy=f"if site.toml names the wrong folder, write `data = {json.dumps(os.path.abspath(data))}` in "
            f"{directory / 'site.toml'}, then run this command again",
        )
    return read_request(directory / REQUEST) if (directory / REQUEST).exists() else new_request(directory)


def _lay_out(directory: Path, kit: SiteKit, text: str) -> JoinRequest:
    """Create node key, certificate, study, policy and request in a directory, all or nothing."""
    with all_or_nothing(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # closed to other users of the machine
        create_node_keys(directory / "node" / "keys", comment=kit.facts.site)
        write_atomically(directory / "node" / "ca.crt", _received(kit.root_certificate))
        write_atomically(directory / "study.toml", _received(kit.study_file))
        if os.path.lexists(kit.start_file):
            write_atomically(directory / START, _received(kit.start_file), mode=0o600)
        write_atomically(directory / "site.toml", text.encode())
        write_link(directory)
        return new_request(directory)


def new_request(directory: Path) -> JoinRequest:
    """Write the site's request to the consortium, with the current state of its ledger, in place of an earlier one.

    Args:
        directory: The site's directory.

    Returns:
        The request.
    """
    config = load_site(directory)
    books = stated_books(config)
    with open_books(config) as ledger:
        return write_request(
            directory / REQUEST,
            study=config.load_study().id,
            site=config.site,
            pool=config.pool,
            node_key=directory / "node" / "keys" / "node",
            books=books,
            sign=ledger.sign,
        )


def _site_toml(
    kit: SiteKit, *, data: str, pool: str | None = None, caps: PrivacyConfig | None = None, books: str | None = None
) -> str:
    """Return the text of ``site.toml``.

    A directory with a ledger of its own states ``pool`` and ``caps``. One that joined another directory's ledger states
    the path of that directory as ``books``.
    """
    whose = {"pool": pool} if books is None else {"books": books}
    values: dict[str, dict[str, object]] = {
        "": {"schema": SITE_SCHEMA, "site": kit.facts.site, **whose, "data": data, "study": "study.toml"},
        "server": {
            "sealing_key": kit.facts.sealing_key,
            "signing_key": kit.facts.signing_key,
            "objects_url": kit.facts.objects_url,
            "superlink": kit.facts.superlink,
            "root_certificates": "node/ca.crt",
            **({"ledger": kit.facts.ledger} if kit.facts.ledger else {}),
        },
    }
    if caps is not None:
        values["caps"] = {
            "epsilon": caps.epsilon,
            "delta": caps.delta,
            "accountant": caps.accountant,
            "unit": caps.unit,
            "relation": caps.relation,
            "queries_per_day": 1000,
        }
    lines = ["# A hospital's policy. Only the site can change it; the server cannot."]
    if books is not None:
        lines.append(
            "# The pool's caps hold for all its studies; they are in site.toml of the directory named by books."
        )
    for section, table in values.items():
        lines += ["", *(f"# {line}" for line in _SAID[section].splitlines()), f"[{section}]"] if section else []
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n" + _MORE


_SAID = {
    "server": "The consortium's keys and address, from the startup kit. Change them only if the consortium says so.",
    "caps": "The most this pool may ever spend, over all studies. The site's own ledger enforces it; the server's may\n"
    "be lower. queries_per_day is the most queries that the site accepts in a day.",
}
_MORE = f"""
# The lines below have no effect. Remove the # to use them.

# How the data are read. Layouts: {", ".join(LAYOUTS)}; auto recognises it. patients: a table that names each
# case's patient.
# [dataset]
# layout = "auto"
# patients = "patients.csv"

# This site's names = the study's names, if they differ.
# [labels]
# "left hippocampus" = "anterior"
# [channels]
# "T1" = "MRI"

# BIDS: which of several files of one contrast to use.
# [bids.T1w]
# acq = "mprage"

# SHA-256 of the only studies, codecs and volumes that this site accepts. An empty list allows all that the study uses.
# [allow]
# studies = []
# codecs = []
# volumes = []

# What the server's operator may know besides the answers. case_counts: the numbers of cases used and left out. status:
# what the site's ledger has spent of its cap, its alarms and its version, sent with every reply to receipts.
# [share]
# case_counts = false
# status = false
"""
