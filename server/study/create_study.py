"""Setting a study up at the server: its directory, keys, ledger, public volumes, codec and sites.

The first study of a consortium begins its ledger; others share it, so that a patient pool has one sum over all of them.
Refuses a directory that already holds a study, a public volume that cannot be read on the study's grid, a label map
that belongs to a public volume's case, a site registered twice, and a pool of the ledger with other books than it has.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common.admission import KitFacts, StatedBooks
from common.canonical import sha256_file
from common.config import Study, render_study
from common.data.dataset import Dataset, check_labels
from common.errors import InvalidInput
from common.ledger.charges import PoolDeclaration, Spend
from common.ledger.keys import (
    create_sealing_key,
    create_signing_key,
    load_sealing_key,
    load_signing_key,
    public_hex,
    public_pem,
)
from common.objects import all_or_nothing, write_atomically
from common.privacy.accounting import max_mu_squared
from common.privacy.figures import epsilon_text
from server.ledger.server_ledger import Ledger
from server.protocols.query_protocol import check_study, protocol_of
from server.public.material import CodecRecord, OnStage, PairedFiles
from server.study.pools import check_shared
from server.study.workspace import Site, Workspace


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The public halves of the server's keys, in hex, for the sites' startup kits."""

    sealing_key: str
    signing_key: str


def create_study(
    workspace: Workspace, study: Study, *, ledger: Path | None = None, standing: Path | None = None
) -> None:
    """Lay out a study's directory with its keys and a ledger that knows the study.

    ``ledger``: the directory of a study, or its ledger file, whose ledger and signing key this one shares; the sealing
    key is always its own, and a ledger whose every pool is spent is refused. Without it a ledger is begun, its standing
    in ``standing`` if given, on another disk. What fails leaves nothing behind. InvalidInput for a budget that no
    release can be held to.
    """
    if workspace.study_file.exists():
        raise InvalidInput("directory already holds a study", value=str(workspace.root), remedy="choose another one")
    shared = None if ledger is None else Workspace(ledger if ledger.is_dir() else ledger.parent)
    if shared is not None and not shared.ledger_file.is_file():
        raise InvalidInput("ledger to share", value=str(ledger), limit="a study's directory or its ledger.sqlite")
    if shared is not None and standing is not None:
        raise InvalidInput("standing of a shared ledger", value=str(standing), limit="where it has been kept so far")
    check_study(study)
    max_mu_squared(study.privacy.accountant, study.privacy.budget)
    with all_or_nothing(workspace.root, *(() if standing is None else (standing,))):
        workspace.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        workspace.sealing_key_file.parent.mkdir(mode=0o700, exist_ok=True)
        create_sealing_key(workspace.sealing_key_file)
        if shared is not None:
            workspace.share_ledger(shared.books_dir)
            with _open_ledger(workspace) as opened:
                check_shared(opened, study)
                opened.register_study(study)
        else:
            signing_key = create_signing_key(workspace.signing_key_file)
            with Ledger.create(workspace.ledger_file, signing_key=signing_key, standing=standing) as opened:
                opened.register_study(study)
        write_atomically(workspace.study_file, render_study(study).encode())


def server_keys(workspace: Workspace) -> ServerKeys:
    """The server's public keys."""
    return ServerKeys(
        sealing_key=public_hex(load_sealing_key(workspace.sealing_key_file)),
        signing_key=public_hex(load_signing_key(workspace.signing_key_file)),
    )


def publish_volumes(workspace: Workspace, images: Sequence[Path], *, paired: Dataset | None = None) -> tuple[str, ...]:
    """Put the public volumes into the object store, in the given order; each must load on the study's grid.

    ``paired``: volumes with their label maps, as many as the study promises and none of those asked about.
    """
    from common.data.volume import volume_from_bytes

    study = workspace.study()
    _refuse_answered(workspace, study, "public volumes")
    pairs = _paired_files(workspace, study, paired)
    volumes = []
    for image in images:
        data = image.read_bytes()
        try:
            volume_from_bytes(data, study.data)
        except InvalidInput as error:
            raise InvalidInput(
                f"{image.name} is no public volume of this study ({error.what})",
                value=error.value,
                limit=error.limit,
                remedy=error.remedy or "take it out of the folder",
            ) from error
        volumes.append(workspace.objects.put(data))
    if len(set(volumes)) != len(volumes):
        raise InvalidInput("public volumes", limit="no volume twice", remedy="remove the duplicate")
    if {files.image for files in pairs} & set(volumes):
        raise InvalidInput(
            "paired public volumes", limit="none that is asked about", remedy="publish it as one of both"
        )
    protocol_of(study).agenda(study).check_volumes(len(volumes))
    if pairs:
        workspace.save_paired(pairs)
    workspace.save_volumes(tuple(volumes))
    return tuple(volumes)


def publish_validation(workspace: Workspace, dataset: Dataset) -> int:
    """Keep a dataset's labelled cases for scoring student and controls; returns how many.

    Nothing is trained on them or chosen by them, so none may be a volume that the study learns from.
    """
    cases = _keep(workspace, workspace.study(), dataset)
    learnt = {*workspace.volumes(), *(files.image for files in workspace.paired())}
    if not cases or learnt & {files.image for files in cases}:
        raise InvalidInput(
            "validation cases",
            value=len(cases),
            limit="at least one with a label map, and none that the study learns from",
            remedy="give labelled public cases of other people",
        )
    workspace.save_validation(cases)
    return len(cases)


def _paired_files(workspace: Workspace, study: Study, paired: Dataset | None) -> tuple[PairedFiles, ...]:
    cases = () if paired is None else paired.labelled
    if len(cases) != study.codec.paired:
        raise InvalidInput(
            "paired public volumes",
            value=len(cases),
            limit=f"{study.codec.paired}, as codec.paired says",
            remedy="give them with --paired, or another number to `study init`",
        )
    return () if paired is None else _keep(workspace, study, paired)


def _keep(workspace: Workspace, study: Study, dataset: Dataset) -> tuple[PairedFiles, ...]:
    """A dataset's labelled cases among the public objects; each must load on the study's grid."""
    from common.data.volume import example_from_bytes

    check_labels(dataset, study.data)
    found = []
    for case in dataset.labelled:
        assert case.label is not None  # labelled
        image, label = case.image.read_bytes(), case.label.read_bytes()
        try:
            example_from_bytes(image, label, study.data)
        except InvalidInput as error:
            raise InvalidInput(
                f"{case.id} is no case of this study ({error.what})",
                value=error.value,
                limit=error.limit,
                remedy=error.remedy or "take it out of the dataset",
            ) from error
        found.append(PairedFiles(workspace.objects.put(image), workspace.objects.put(label)))
    if len({files.image for files in found}) != len(found):
        raise InvalidInput("public volumes with label maps", limit="no volume twice", remedy="remove the duplicate")
    return tuple(found)


def fit_study_codec(
    workspace: Workspace,
    label_maps: Sequence[Path],
    *,
    sites: int,
    private_hashes: Collection[str] = (),
    on_stage: OnStage | None = None,
) -> CodecRecord:
    """Fit the study's codec on public label maps for the planned noise on the mean code of ``sites`` sites.

    Then make what else the study's protocol needs before its first question; the volumes must be published before.
    ``private_hashes``: SHA-256 of label map files known to be of private, validation or test cases; a match is refused.
    Interrupted, it leaves no codec. Refuses a study with answers, which are in the codec they were asked in.
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
        workspace.volumes()  # what comes after the codec asks about them, and they may have been forgotten
    told = on_stage or (lambda _name, _done, _total: None)
    maps, last = [], len(study.data.labels) - 1
    for number, path in enumerate(label_maps):
        told("label maps", number, len(label_maps))
        try:
            maps.append(load_label(path, study.data))
        except InvalidInput as error:
            raise InvalidInput(
                f"{path.name} is no label map of this study ({error.what})",
                value=error.value,
                limit=error.limit,
                remedy=f"give --label-maps a folder of label maps, values 0 to {last}, not images",
            ) from error
    told("label maps", len(label_maps), len(label_maps))
    told("codec", 0, 1)
    codec = fit_codec(
        study,
        maps,
        sites=sites,
        map_hashes=[sha256_file(path) for path in label_maps],
        private_hashes=private_hashes,
    )
    record = CodecRecord(sha256=workspace.objects.put(codec.to_bytes()), dimension=codec.dimension)
    told("codec", 1, 1)
    workspace.forget_codec()  # what is prepared belongs to one codec
    protocol_of(study).prepare(lambda: workspace.public(codec=record), sites=sites, on_stage=on_stage)
    workspace.save_codec(record)
    return record


def _refuse_answered(workspace: Workspace, study: Study, what: str) -> None:
    """InvalidInput where stored answers, which were paid for, could not be read any more with another ``what``."""
    with _open_ledger(workspace) as ledger:
        answers = len(ledger.answers(study.id))
    if answers:
        raise InvalidInput(
            f"{what} of a study that has answers",
            value=f"{answers} answers",
            limit="the value with which they were asked",
            remedy="make another study that shares the ledger: `consilium study init --ledger`",
        )


def neighbour_study(directory: Path) -> Path | None:
    """A study beside this directory that has a ledger a new one could share; None if there is none."""
    return next((path for path in studies_beside(directory) if Workspace(path).ledger_file.exists()), None)


def studies_beside(directory: Path) -> tuple[Path, ...]:
    """The other studies' directories in the folder of this one, by name."""
    here = directory.absolute()
    found = (path.parent for path in sorted(here.parent.glob("*/study.toml")))
    return tuple(path for path in found if path != here)


_REMEDY = (
    "the site joins with the books it has (`consilium site join --from`), or carries them over to its new machine: "
    "docs/deployment.md"
)


def pool_to_declare(
    workspace: Workspace, site: str, pool: str, *, books: StatedBooks | None, pool_epsilon: float | None
) -> PoolDeclaration:
    """The declaration under which a site with this pool may be admitted, by what the ledger knows from any study.

    A pool's lifetime budget is what the study says (``[pool]``), or ``pool_epsilon`` at its δ, when it is first
    declared; later studies leave it as it is, whatever they say, unless a ``pool_epsilon`` makes it tighter.

    A pool the ledger knows goes on with its sum, so whoever brings it must bring its books: InvalidInput if the request
    names none, others than are on record, or books that show less than this ledger charged; for a looser budget, a pool
    known under another site, and a site known with another pool.
    """
    with Ledger.open(workspace.ledger_file) as ledger:
        known = {declared.pool: declared for declared in ledger.pools()}
        spent, recorded = ledger.spent(pool), ledger.books_of(pool)
        owner = next((name for name in known if books and ledger.books_of(name) == books.ledger_id), pool)
    other = next((name for name, declared in known.items() if declared.site == site and name != pool), None)
    if other is not None:
        raise InvalidInput(
            f"patient pool of site {site}", value=pool, limit=f"{other}, as in the ledger", remedy=_REMEDY
        )
    if owner != pool:
        raise InvalidInput(f"books of pool {owner}, named for pool {pool}", limit="one ledger for each pool")
    if pool not in known:
        study = workspace.study()
        protection = study.privacy.protection if books is None else books.protection
        declared = PoolDeclaration(pool, site, study.pool_budget, study.privacy.accountant, protection)
        return _tightened(declared, pool_epsilon)
    if known[pool].site != site:
        raise InvalidInput(f"site of pool {pool}", value=site, limit=f"{known[pool].site}, as first declared")
    _check_books(pool, books, recorded=recorded, spent=spent)
    if pool_epsilon is not None and pool_epsilon > known[pool].budget.epsilon:
        raise InvalidInput(
            f"ε of pool {pool} for life",
            value=pool_epsilon,
            limit=f"at most {epsilon_text(known[pool].budget.epsilon)}, as declared",
            remedy="a pool's budget is for its whole life and can only be made tighter",
        )
    return _tightened(known[pool], pool_epsilon)


def _check_books(pool: str, books: StatedBooks | None, *, recorded: str | None, spent: Spend) -> None:
    """InvalidInput unless these are the books on record of a known pool, and show all that was charged."""
    if books is None or books.ledger_id != (recorded or books.ledger_id):
        raise InvalidInput(
            f"books of pool {pool}, which this ledger knows",
            value="none named" if books is None else books.ledger_id,
            limit=recorded or "the site ledger that keeps them",
            remedy=_REMEDY,
        )
    if books.mu_squared < spent.mu_squared:
        raise InvalidInput(
            f"books of pool {pool} show less than this ledger charged",
            value=f"Σμ² = {float(books.mu_squared):g}",
            limit=f"at least {float(spent.mu_squared):g}",
            remedy=f"{_REMEDY}; for an older copy of them `consilium site recover --own-ledger`, then a new request",
        )


def _tightened(declaration: PoolDeclaration, epsilon: float | None) -> PoolDeclaration:
    return declaration if epsilon is None else replace(declaration, budget=replace(declaration.budget, epsilon=epsilon))


def add_site(
    workspace: Workspace, site: Site, *, books: StatedBooks | None = None, pool_epsilon: float | None = None
) -> None:
    """Declare a registered site's patient pool as :func:`pool_to_declare` says, then record the site."""
    declaration = pool_to_declare(workspace, site.name, site.pool, books=books, pool_epsilon=pool_epsilon)
    sites = (*workspace.registered(), site)
    workspace.check_sites(sites)
    with _open_ledger(workspace) as ledger:
        ledger.declare_pool(declaration)
        if books is not None:
            ledger.declare_books(site.pool, books.ledger_id)
    workspace.save_sites(sites)


def _open_ledger(workspace: Workspace) -> Ledger:
    return Ledger.open(workspace.ledger_file, signing_key=load_signing_key(workspace.signing_key_file))


def write_kit(
    workspace: Workspace, directory: Path, *, site: str, superlink: str, objects_url: str, authority: Path
) -> None:
    """A site's startup kit: kit.json (name, public keys, addresses), ca.crt and study.toml; nothing in it is secret.

    consortium.pem is the signing key's public half once more, for checking the offline bundle with openssl.
    For a study with a public start whose teachers have the student's network also start.pt, that start.
    """
    keys = server_keys(workspace)
    kit = KitFacts(objects_url, keys.sealing_key, keys.signing_key, site, superlink)
    write_atomically(directory / "kit.json", (json.dumps(kit.to_json(), indent=1) + "\n").encode())
    write_atomically(directory / "consortium.pem", public_pem(load_signing_key(workspace.signing_key_file)))
    write_atomically(directory / "ca.crt", authority.read_bytes())
    write_atomically(directory / "study.toml", workspace.study_file.read_bytes())
    study = workspace.study()
    same = (study.teacher.channels, study.teacher.network) == (study.student.channels, study.student.network)
    if workspace.start_file.exists() and same:
        write_atomically(directory / "start.pt", workspace.start_file.read_bytes())
