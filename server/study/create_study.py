"""Creates a study at the server: its directory, keys, ledger, public volumes, codec and sites.

`consilium study init` and `publish`, `codec fit` and `provision` call it. The first study of a consortium creates a
ledger. Later studies share it, so that the spending of a patient pool is added up over all of them.

It refuses a directory that already holds a study, a public volume that cannot be read on the study's grid, a label map
known to be of a private or test case, and a site registered twice. It also refuses a known pool whose site shows
another site ledger than before.
"""

from __future__ import annotations

import fcntl
import os
import shlex
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from common.admission import KitFacts, StatedBooks
from common.canonical import sha256_file
from common.config import Study, render_study
from common.data.dataset import Dataset
from common.errors import ConsiliumError, InvalidInput
from common.ledger.charges import PoolDeclaration, Spend
from common.ledger.keys import (
    create_sealing_key,
    create_signing_key,
    load_sealing_key,
    load_signing_key,
    public_hex,
    public_pem,
)
from common.ledger.rollback_guard import standing_path
from common.objects import all_or_nothing, write_atomically, write_json
from common.privacy.accounting import max_mu_squared
from common.privacy.figures import epsilon_text
from server.ledger.server_ledger import Ledger
from server.protocols.query_protocol import check_study, protocol_of
from server.public.material import CodecRecord, OnStage, PairedFiles
from server.study.pools import check_shared
from server.study.public_cases import naming, paired_files, scored_cases
from server.study.workspace import PAIRED, VALIDATION, Site, Workspace


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The server's public keys in hexadecimal, for the sites' startup kits.

    Attributes:
        sealing_key: Public key to which sites encrypt their codes; only the core can decrypt them.
        signing_key: Public key that verifies the ledger's signatures.
    """

    sealing_key: str
    signing_key: str


def create_study(
    workspace: Workspace,
    study: Study,
    *,
    ledger: Path | None = None,
    standing: Path | None = None,
    start: bytes | None = None,
) -> None:
    """Create a study's directory, with its keys and a ledger in which the study is registered.

    If it fails, everything that it created is deleted.

    Args:
        workspace: The new directory.
        study: The study's terms.
        ledger: Directory or ledger file of another study. The new study then shares that study's ledger and signing
            key, but has a new sealing key. By default a new ledger is created.
        standing: File on another disk for a new ledger's standing, the small file that records its newest row.
        start: Content of the file of weights that the study's section [start] names. It is stored among the study's
            public objects.

    Raises:
        InvalidInput: If the directory holds a study or a part of one, if hospitals cannot tell two labels or channels
            apart, if the ledger cannot be shared, if no pool of the shared ledger can pay for a query, or if a budget
            is too small for any release or too large to protect anybody.
    """
    with _one_at_a_time(workspace.root):
        if workspace.study_file.exists():
            raise InvalidInput(
                "directory already holds a study", value=str(workspace.root), remedy="choose another directory"
            )
        _refuse_interrupted(workspace.root)
        shared = None if ledger is None else Workspace(ledger if ledger.is_dir() else ledger.parent)
        if shared is not None and not shared.ledger_file.is_file():
            raise InvalidInput("ledger to share", value=str(ledger), limit="a study's directory or its ledger.sqlite")
        if shared is not None and standing is not None:
            raise InvalidInput(
                "--standing for a shared ledger",
                value=str(standing),
                limit="only for a new ledger; a shared ledger's standing file stays in its place",
                remedy="leave out --standing",
            )
        check_study(study)
        if start is not None or study.start.weights:
            from server.study.start import check_fits  # torch

            check_fits(study, start)
        for budget in (study.privacy.budget, study.pool_budget):
            max_mu_squared(study.privacy.accountant, budget)
        with all_or_nothing(workspace.root, *(() if standing is None else (standing,))):
            workspace.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            workspace.sealing_key_file.parent.mkdir(mode=0o700, exist_ok=True)
            create_sealing_key(workspace.sealing_key_file)
            if shared is not None:
                workspace.share_ledger(shared.books_dir)
                with open_ledger(workspace) as opened:
                    _refuse_again(workspace, opened, study)
                    check_shared(opened, study)
                    opened.register_study(study)
            else:
                signing_key = create_signing_key(workspace.signing_key_file)
                with Ledger.create(workspace.ledger_file, signing_key=signing_key, standing=standing) as opened:
                    opened.register_study(study)
            if start is not None:
                workspace.objects.put(start)
                write_atomically(workspace.start_file, start)
            write_atomically(workspace.study_file, render_study(study).encode())


def _refuse_again(workspace: Workspace, ledger: Ledger, study: Study) -> None:
    """Refuse a study that is in the shared ledger already.

    A study with neither charges nor a directory is accepted, because a killed call leaves it in this state.
    """
    if study.id not in ledger.books.studies:
        return
    made = (one.root for one in _sharing(workspace) if one.study_file.exists() and one.study().id == study.id)
    value = next(map(str, made), "charges, but no directory beside this one" if _charged(ledger, study) else None)
    if value is not None:
        raise InvalidInput(
            f"the shared ledger already has study {study.name}",
            value=value,
            limit="one directory for each study",
            remedy="go on in its first directory, or restore that from a backup; give a new study another name",
        )


def _charged(ledger: Ledger, study: Study) -> bool:
    return any(pool.in_study.spend.releases for pool in ledger.study_facts(study).pools.values())


@contextmanager
def _one_at_a_time(root: Path) -> Iterator[None]:
    """Wait while another process is creating a study beside ``root``; one could delete the other's files."""
    parents = root.absolute().parents
    made = [folder for folder in parents if not folder.exists()]  # innermost first
    parents[0].mkdir(parents=True, exist_ok=True)
    descriptor = os.open(parents[0], os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
        with suppress(OSError):  # not empty, because the study is there
            for folder in made:
                folder.rmdir()


_BEGUN = ("keys/*", "ledger.*")
"""The files that the set-up of a study writes before ``study.toml``, as patterns."""


def _refuse_interrupted(root: Path) -> None:
    """Refuse a directory with keys or a ledger but without a study, and say what to delete.

    A killed call leaves such a directory. So does the loss of ``study.toml``; then nothing may be deleted.
    """
    if not any(any(root.glob(name)) for name in _BEGUN):
        return
    ledger = root / "ledger.sqlite"
    empty, standing = _nothing_charged(ledger), standing_path(ledger)
    left = [path for name in _BEGUN for path in sorted(root.glob(name))]  # after the read, which makes lock files
    if standing.exists() and standing not in left:  # on another disk
        left.append(standing)
    remedy = f"restore {root / 'study.toml'}"
    if empty:
        remedy = (
            f"if a study was set up here, {remedy}; if `study init` was interrupted here, "
            f"`{shlex.join(['rm', '-r', *map(str, left)])}`, then run it again"
        )
    raise InvalidInput(
        "directory with keys or a ledger but without study.toml",
        value=str(root),
        limit="a new directory",
        remedy=remedy,
    )


def _nothing_charged(file: Path) -> bool:
    """Return whether a ledger has only the rows that set-up writes, or neither it nor its standing exists.

    The result is False if the ledger cannot be read or is an older copy.
    """
    standing = standing_path(file)
    if not file.exists():
        return not standing.exists()
    try:
        with Ledger.open(file) as ledger:
            older = standing.exists() and ledger.forgotten() is not None
            return not older and all(row.kind in ("genesis", "study") for row in ledger.rows())
    except ConsiliumError:
        return False


def server_keys(workspace: Workspace) -> ServerKeys:
    """Return the server's public keys.

    Args:
        workspace: The study's directory.

    Returns:
        The keys in hexadecimal.

    Raises:
        InvalidInput: If a private key's file cannot be read.
    """
    return ServerKeys(
        sealing_key=public_hex(load_sealing_key(workspace.sealing_key_file)),
        signing_key=public_hex(load_signing_key(workspace.signing_key_file)),
    )


def publish_volumes(
    workspace: Workspace, images: Sequence[Path], *, paired: Dataset | None = None, validation: Dataset | None = None
) -> tuple[str, ...]:
    """Put the public volumes into the object store, and record them in the given order.

    Every file is read before anything is recorded.

    Args:
        workspace: The study.
        images: Files of the volumes that hospitals are asked about.
        paired: The study's public pairs (volumes with label maps), as many as ``codec.paired`` states. Hospitals are
            not asked about them.
        validation: Labelled cases to publish with the volumes (:func:`publish_validation`).

    Returns:
        Content hashes of the volumes that hospitals are asked about.

    Raises:
        InvalidInput: If a volume cannot be read on the study's grid or is given twice, if the number of volumes or of
            pairs does not fit the study, if the study has answers, or if a validation case is refused or is one of
            the volumes.
    """
    study = workspace.study()
    _refuse_answered(workspace, study, "public volumes")
    pairs = paired_files(workspace, study, paired)
    volumes = _published(workspace, study, images)
    _refuse_twice(volumes, paired=pairs)
    protocol_of(study).query_plan(study).check_volumes(len(volumes))
    scored = scored_cases(workspace, study, validation, learnt={*volumes, *(files.image for files in pairs)})
    if pairs:
        workspace.save_records(PAIRED, pairs)
    workspace.save_volumes(volumes)
    if validation is not None:
        workspace.save_records(VALIDATION, scored)
    return volumes


def _published(workspace: Workspace, study: Study, images: Sequence[Path]) -> tuple[str, ...]:
    """Store images as public objects and return their hashes in order; each must load on the study's grid."""
    from common.data.volume import volume_from_bytes

    volumes = []
    for image in images:
        data = image.read_bytes()
        with naming(f"{image.name} is no public volume of this study", remedy="take it out of the folder"):
            volume_from_bytes(data, study.data)
        volumes.append(workspace.objects.put(data))
    return tuple(volumes)


def _refuse_twice(volumes: Sequence[str], *, paired: Sequence[PairedFiles]) -> None:
    if len(set(volumes)) != len(volumes):
        raise InvalidInput(
            "public volumes of which one is given twice", limit="each volume once", remedy="remove the duplicate"
        )
    if {files.image for files in paired} & set(volumes):
        raise InvalidInput(
            "public pairs of which one is also a volume that hospitals are asked about",
            limit="pairs of other volumes",
            remedy="publish the volume with its label map (--paired), or as one that hospitals are asked about",
        )


def add_volumes(workspace: Workspace, images: Sequence[Path], *, validation: Dataset | None = None) -> tuple[str, ...]:
    """Append public volumes to those already published.

    Stored answers stay, and the next run asks about the new volumes. Volumes can be added only if each query is about
    one volume, and only up to the number of planned queries, for which the noise was set. The first volumes can be
    published in this way too, even fewer than planned.

    Args:
        workspace: The study's directory.
        images: Files of the volumes to add.
        validation: Labelled cases to publish with the volumes (:func:`publish_validation`).

    Returns:
        Content hashes of all public volumes, in query order.

    Raises:
        InvalidInput: If every query is about all volumes, if there would be more volumes than planned queries, if a
            volume cannot be read on the study's grid, if a volume is given twice, or if a validation case is refused
            or is one of the volumes.
    """
    study = workspace.study()
    query_plan = protocol_of(study).query_plan(study)
    if query_plan.asks is None:
        raise InvalidInput(
            "volumes added to a study that asks about all of its volumes at once",
            remedy=f"before the first answer, publish all volumes together, without --add; after it, {_NEXT_STUDY}",
        )
    volumes = (*(workspace.volumes() if workspace.published() else ()), *_published(workspace, study, images))
    _refuse_twice(volumes, paired=())
    if len(volumes) > query_plan.asks:
        raise InvalidInput(
            "number of public volumes, including the added ones",
            value=len(volumes),
            limit=f"at most the {query_plan.asks} planned queries, for which the noise was set",
            remedy=_NEXT_STUDY,
        )
    scored = scored_cases(workspace, study, validation, learnt=set(volumes))
    workspace.save_volumes(volumes)
    if validation is not None:
        workspace.save_records(VALIDATION, scored)
    return volumes


_NEXT_STUDY = "create another study on the same ledger: `consilium study init --ledger STUDY --start STUDY/bundle`"


def publish_validation(workspace: Workspace, dataset: Dataset) -> int:
    """Store a dataset's labelled cases for scoring student and controls; nothing is trained or selected on them.

    Args:
        workspace: The study.
        dataset: Labelled public cases, none of which the study learns from.

    Returns:
        Number of cases.

    Raises:
        InvalidInput: If no case has a label map, or the study learns from one of the cases.
    """
    study = workspace.study()
    learnt = {*workspace.volumes(), *(files.image for files in workspace.paired())}
    cases = scored_cases(workspace, study, dataset, learnt=learnt)
    workspace.save_records(VALIDATION, cases)
    return len(cases)


def fit_study_codec(
    workspace: Workspace,
    label_maps: Sequence[Path],
    *,
    sites: int,
    private_hashes: Collection[str] = (),
    on_stage: OnStage = lambda _name, _done, _total: None,
) -> CodecRecord:
    """Fit the study's codec on public label maps, and prepare what the study's protocol needs before the first query.

    If the protocol uses the public volumes, they must be published before. If the call is interrupted, the study may
    have no codec until the next call.

    Args:
        workspace: The study.
        label_maps: Files of public label maps.
        sites: Number of sites expected to answer. The planned noise on the mean code is computed from it.
        private_hashes: SHA-256 of every label map file that is known to be of a private, validation or test case; such
            a file is refused.
        on_stage: Called with the name of the current stage, the number of steps done, and the total number of steps.

    Returns:
        The codec's record.

    Raises:
        InvalidInput: If the study has answers, which only the codec of their queries can decode; if there are fewer
            sites than the quorum; or if a label map is missing, unreadable or private.
    """
    from common.codecs.codec import fit_codec
    from common.data.volume import load_label

    study = workspace.study()
    _refuse_answered(workspace, study, "codec")
    if sites < study.privacy.quorum:
        raise InvalidInput("--sites", value=sites, limit=f"at least the study's quorum, {study.privacy.quorum}")
    if not label_maps:
        raise InvalidInput("public label maps", value=0, limit="at least 4")
    if study.codec.terms.framed:
        workspace.volumes()  # raises if they are not published: preparing the protocol needs them
    maps = []
    for number, path in enumerate(label_maps):
        on_stage("label maps", number, len(label_maps))
        with naming(f"{path.name} is no label map of this study", remedy="take it out of the folder"):
            maps.append(load_label(path, study.data))
    on_stage("label maps", len(label_maps), len(label_maps))
    on_stage("codec", 0, 1)
    codec = fit_codec(
        study,
        maps,
        sites=sites,
        map_hashes=[sha256_file(path) for path in label_maps],
        private_hashes=private_hashes,
    )
    record = CodecRecord(sha256=workspace.objects.put(codec.to_bytes()), dimension=codec.dimension)
    on_stage("codec", 1, 1)
    workspace.forget_codec()  # what is prepared next belongs to the new codec only
    protocol_of(study).prepare(lambda: workspace.public(codec=record), sites=sites, on_stage=on_stage)
    workspace.save_codec(record)
    return record


def _refuse_answered(workspace: Workspace, study: Study, what: str) -> None:
    """Raise InvalidInput if the study has answers: changing ``what`` would make them unreadable."""
    with open_ledger(workspace) as ledger:
        answers = len(ledger.answers(study.id))
    if answers:
        raise InvalidInput(
            f"{what} of a study that has answers",
            value=f"{answers} answers",
            limit=f"no change of the {what} after the first answer, because the stored answers need it",
            remedy="create another study that shares the ledger: `consilium study init --ledger`",
        )


def studies_beside(directory: Path) -> tuple[Path, ...]:
    """Return the directories of the other studies in the same folder.

    Args:
        directory: Directory of a study, which need not exist.

    Returns:
        The directories, sorted by name.
    """
    here = directory.absolute()
    found = (path.parent for path in sorted(here.parent.glob("*/study.toml")))
    return tuple(path for path in found if path != here)


_REMEDY = (
    "the site must join with the site ledger that it has for this pool (`consilium site join --from`), or move that "
    "ledger to its new machine (docs/deployment.md)"
)


def pool_to_declare(
    workspace: Workspace, site: str, pool: str, *, books: StatedBooks | None, pool_epsilon: float | None
) -> PoolDeclaration:
    """Return the declaration of a site's patient pool, with its lifetime budget, for admitting the site.

    A pool's lifetime budget is set when the pool is first declared: to the budget in the study's section [pool], or to
    ``pool_epsilon`` at the same δ. Later studies do not change this budget, unless ``pool_epsilon`` makes it tighter. A
    known pool keeps its spending, so its site must join with the site ledger that keeps the pool's budget.

    Args:
        workspace: The study.
        site: Name of the site.
        pool: Name of the site's patient pool.
        books: What the join request states about the site's own ledger; None if it states nothing.
        pool_epsilon: The pool's lifetime ε; None to keep the known or the study's budget.

    Returns:
        The declaration to enter into the ledger.

    Raises:
        InvalidInput: If the pool belongs to another site, or the site has another pool. If the pool is known and the
            join request names no site ledger, another one than is on record, or one that shows less spending than the
            server's ledger charged. If the request names the site ledger of another pool, and the keys show that the
            ledger belongs to that pool's site. If ``pool_epsilon`` is above the pool's declared ε.
    """
    with Ledger.open(workspace.ledger_file) as ledger:
        known = {declared.pool: declared for declared in ledger.pools()}
        spent, recorded = ledger.spent(pool), ledger.books.pool_books.get(pool)
    owner = claimant(workspace, pool, books)
    other = next((name for name, declared in known.items() if declared.site == site and name != pool), None)
    if other is not None:
        raise InvalidInput(
            f"patient pool of site {site}", value=pool, limit=f"{other}, the site's pool in the ledger", remedy=_REMEDY
        )
    if owner is not None and books is not None and books.answer_key in _answer_keys(workspace, owner):
        raise InvalidInput(
            f"the join request for pool {pool} names the site ledger of pool {owner}",
            limit="a site ledger of its own for each pool",
            remedy=_REMEDY,
        )
    if pool not in known:
        study = workspace.study()
        protection = study.privacy.protection if books is None else books.protection
        declared = PoolDeclaration(pool, site, study.pool_budget, study.privacy.accountant, protection)
        return _tightened(declared, pool_epsilon)
    if known[pool].site != site:
        raise InvalidInput(
            f"site of pool {pool}",
            value=site,
            limit=f"{known[pool].site}, as first declared",
            remedy="have the site join under this name, or with another pool",
        )
    _check_books(pool, books, recorded=recorded, spent=spent)
    if pool_epsilon is not None and pool_epsilon > known[pool].budget.epsilon:
        raise InvalidInput(
            f"lifetime ε of pool {pool}",
            value=pool_epsilon,
            limit=f"at most {epsilon_text(known[pool].budget.epsilon)}, as declared",
            remedy="give at most this ε, because a pool's lifetime budget can only be made tighter",
        )
    return _tightened(known[pool], pool_epsilon)


def claimant(workspace: Workspace, pool: str, books: StatedBooks | None) -> str | None:
    """Return the other pool for which a join request stated the same site ledger before.

    A site learns the ids of other sites' ledgers and can claim one of them as its own. A repeated id alone therefore
    excludes no pool: the second pool is admitted without a recorded site ledger, and a message names both pools.

    A site gains nothing by such a claim. The server's ledger charges its pool like any other, and the next join request
    must still show at least this charge. What the pool spent at other servers is the site's own statement in any case,
    and concerns only its own patients.

    Args:
        workspace: The study.
        pool: Name of the site's patient pool.
        books: What the pool's join request states about the site's own ledger; None if it states nothing.

    Returns:
        The other pool's name; None if there is none.
    """
    if books is None:
        return None
    with Ledger.open(workspace.ledger_file) as ledger:
        stated = (one.pool for one in ledger.pools() if ledger.books.pool_books.get(one.pool) == books.ledger_id)
        return next((name for name in stated if name != pool), None)


def _answer_keys(workspace: Workspace, pool: str) -> set[str]:
    """Return the keys with which a pool's site signs its replies in the known studies that share this ledger."""
    return {one.answer_key for study in _sharing(workspace) for one in study.registered() if one.pool == pool}


def _sharing(workspace: Workspace) -> tuple[Workspace, ...]:
    """Return the known studies that share a study's ledger: this one, and those in the folder of the ledger's study."""
    holder = workspace.books_dir.resolve()
    beside = (Workspace(path) for path in (holder, *studies_beside(holder)))
    return workspace, *(one for one in beside if one.books_dir.resolve() == holder)


def _check_books(pool: str, books: StatedBooks | None, *, recorded: str | None, spent: Spend) -> None:
    """Raise InvalidInput unless a join request for a known pool names the site ledger on record for this pool.

    That site ledger must also show at least the spending that the server's ledger charged to the pool.
    """
    if books is None or books.ledger_id != (recorded or books.ledger_id):
        raise InvalidInput(
            f"site ledger of pool {pool}, which this ledger knows",
            value="none named" if books is None else books.ledger_id,
            limit=f"the site ledger {recorded}" if recorded else "the site ledger that keeps the pool's budget",
            remedy=_REMEDY,
        )
    if books.mu_squared < spent.mu_squared:
        raise InvalidInput(
            f"site ledger of pool {pool} shows less than the server's ledger charged",
            value=f"Σμ² = {float(books.mu_squared):g}",
            limit=f"at least {float(spent.mu_squared):g}",
            remedy=f"{_REMEDY}; if its ledger is an older copy, the site runs `consilium site recover --own-ledger`, "
            "then sends a new request",
        )


def _tightened(declaration: PoolDeclaration, epsilon: float | None) -> PoolDeclaration:
    return declaration if epsilon is None else replace(declaration, budget=replace(declaration.budget, epsilon=epsilon))


def add_site(
    workspace: Workspace, site: Site, *, books: StatedBooks | None = None, pool_epsilon: float | None = None
) -> None:
    """Declare a site's patient pool as :func:`pool_to_declare` returns it, and record the site.

    Args:
        workspace: The study.
        site: The site.
        books: What the join request states about the site's own ledger; None if it states nothing.
        pool_epsilon: The pool's lifetime ε; None to keep the known or the study's budget.

    Raises:
        InvalidInput: If :func:`pool_to_declare` refuses the pool, or another site has the same name or node id.
    """
    declaration = pool_to_declare(workspace, site.name, site.pool, books=books, pool_epsilon=pool_epsilon)
    sites, other = (*workspace.registered(), site), claimant(workspace, site.pool, books)
    workspace.check_sites(sites)
    with open_ledger(workspace) as ledger:
        ledger.declare_pool(declaration)
        if other is not None and books is not None:
            ledger.note(f"pools {other} and {site.pool} state the same site ledger {books.ledger_id}")
        elif books is not None:
            ledger.declare_books(site.pool, books.ledger_id)
    workspace.save_sites(sites)


def open_ledger(workspace: Workspace) -> Ledger:
    """Open a study's ledger with its signing key, so that rows can be added.

    Args:
        workspace: The study.

    Returns:
        The open ledger; the caller closes it.

    Raises:
        LedgerCorrupt: If the ledger cannot be trusted, for example because an older copy was restored.
    """
    return Ledger.open(workspace.ledger_file, signing_key=load_signing_key(workspace.signing_key_file))


def write_kit(
    workspace: Workspace, directory: Path, *, site: str, superlink: str, objects_url: str, authority: Path
) -> None:
    """Write a site's startup kit, the files with which a hospital asks to join; nothing in it is secret.

    The kit holds ``kit.json`` (name, public keys, addresses, ledger), ``ca.crt``, ``study.toml`` and
    ``consortium.pem``. The last is the public signing key in the form that openssl needs to verify the offline bundle.
    If the study has a public start, and its teachers have the same network as its student, the kit also holds the start
    in ``start.pt``.

    Args:
        workspace: The study.
        directory: Where to write.
        site: The site's name.
        superlink: ``host:port`` of the gateway.
        objects_url: Address of the public objects.
        authority: File with the certificate of the consortium's certificate authority.
    """
    keys = server_keys(workspace)
    with Ledger.open(workspace.ledger_file) as ledger:
        ledger_id = ledger.ledger_id
    kit = KitFacts(objects_url, keys.sealing_key, keys.signing_key, site, superlink, ledger=ledger_id)
    write_json(directory / "kit.json", kit.to_json())
    write_atomically(directory / "consortium.pem", public_pem(load_signing_key(workspace.signing_key_file)))
    write_atomically(directory / "ca.crt", authority.read_bytes())
    write_atomically(directory / "study.toml", workspace.study_file.read_bytes())
    study = workspace.study()
    if workspace.start_file.exists() and study.one_network:
        write_atomically(directory / "start.pt", workspace.start_file.read_bytes())
