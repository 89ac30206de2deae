"""Serves the teacher worker over gRPC on a Unix socket, from a site's directory, until it is stopped.

`consilium site up` starts it as a program. Steps:

1. Read the site's policy and study, and open its ledger; consent must be on record.
2. Record what counts as a patient, and record again any withdrawal that the ledger lacks.
3. Load the teachers, and leave out voters that must not vote (:func:`open_worker`).
4. Record the loaded teachers.
5. Answer messages through :class:`client.worker.Worker`.

The text of an error stays at the site: the caller learns only that the message was refused, or that the worker failed.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc

from client.data.cases import has_trained, load_cases
from client.declined import DECLINED
from client.foreign.teacher import ForeignTeacher
from client.ledger.site_ledger import SiteLedger
from client.policy import Consent, load_site
from client.records.declared import check_unit, has_foreign
from client.records.served import retired_voters
from client.records.voter_files import voter_directory
from client.site.books import consent_missing, ids_elsewhere, joined_study, open_books
from client.site.deals import check_trained, reenter_withdrawals, silent_voters
from client.site.fetch import PublicObjects
from client.site.peers import note_offered
from client.teachers.teacher import Teachers
from client.witnessing import Witnessing
from client.worker import Ask, Worker
from common.config import DataConfig, Study
from common.data.volume import volume_from_bytes
from common.errors import ConsiliumError, InvalidInput
from common.objects import shared
from common.plain import log_to_stderr
from common.process import stop_on_signals
from common.protocols.site_protocol import Fetch
from common.witness.memory import FOLDER as WITNESSES
from common.worker_api import HEALTH, SERVICE, channel_options

log = logging.getLogger(__name__)

REPLY_TICK_S = 1.0
"""Length of a tick: replies to codes requests leave a whole number of ticks after the request."""


class TeacherVoters:
    """A site's voters, through which the worker gets their predictions.

    Args:
        teachers: The trained teachers.
        data: The study's labels, channels and grid.
        foreign: Teachers that the hospital added, by voter.
    """

    def __init__(
        self, teachers: Teachers, data: DataConfig, foreign: Mapping[int, ForeignTeacher] | None = None
    ) -> None:
        self._teachers, self._data, self._foreign = teachers, data, foreign or {}

    def predict(self, volume: bytes) -> Sequence[Ask]:
        """Return for each voter a function that computes the voter's prediction of a volume. # sensitive"""
        asks = list(self._teachers.ask(volume_from_bytes(volume, self._data).image))
        for slot, teacher in self._foreign.items():
            asks[slot] = partial(teacher.ask, volume)
        return asks


def serve(worker: Worker, *, socket: Path) -> grpc.Server:
    """Start serving a worker on a Unix socket.

    Only the user who runs this process can open the socket. If the socket's folder has the setgid bit, the folder's
    group can open it too.

    Args:
        worker: The worker.
        socket: Path of the socket.

    Returns:
        The started server.

    Raises:
        InvalidInput: If the socket's path is too long or not writable.
    """

    def handle(body: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return worker.answer(body)
        except ConsiliumError as error:
            log.warning("event=refused cause=%s", type(error).__name__)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "refused")
        except Exception as error:  # noqa: BLE001  the text may hold patients' data
            log.error("event=failed cause=%s", type(error).__name__)
            context.abort(grpc.StatusCode.INTERNAL, "failed")
        raise AssertionError("unreachable")

    def health(_body: bytes, _context: grpc.ServicerContext) -> bytes:
        return b"ok"

    server = grpc.server(ThreadPoolExecutor(max_workers=4), options=channel_options())
    methods = {
        "Handle": grpc.unary_unary_rpc_method_handler(handle),
        HEALTH.rsplit("/", 1)[1]: grpc.unary_unary_rpc_method_handler(health),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    socket.unlink(missing_ok=True)
    before = os.umask(0o117 if shared(socket.parent) else 0o177)
    try:
        if server.add_insecure_port(f"unix:{socket}") == 0:
            raise InvalidInput(
                "path of the worker's socket",
                value=str(socket),
                limit="at most 100 bytes, in a folder to which this user may write",
                remedy="give another path with --socket, or let this user write to the folder",
            )
        server.start()
    finally:
        os.umask(before)
    return server


def open_worker(
    directory: Path, *, sleep: Callable[[float], object] = time.sleep, fetch: Fetch | None = None
) -> Worker:
    """Open the worker of a site's directory, load its teachers, and record them.

    A voter does not vote if its teacher cannot be loaded, if one of its patients was withdrawn since the training, or
    if its teacher was added from elsewhere before the last withdrawal of a patient.

    Args:
        directory: The site's directory.
        sleep: Function by which the worker waits before it replies; it gets a number of seconds.
        fetch: Gets public objects; by default from the server.

    Returns:
        The worker.

    Raises:
        InvalidInput: If no consent is on record, if an added teacher is not on record or the study's unit of privacy is
            the patient, or if :func:`~client.site.deals.check_trained` refuses a trained teacher.
    """
    config = load_site(directory)
    study = joined_study(config)
    ledger = open_books(config)
    if not ledger.has_consent(study.id):
        ledger.close()
        raise consent_missing(study)
    _state_identity(ledger, directory)  # before anything is accepted
    reenter_withdrawals(config.books_dir, ledger)
    loaded_at, retired = ledger.row_count, retired_voters(directory / "teachers")
    teachers = Teachers.load(
        directory / "teachers", data=study.data, voters=study.privacy.voters_per_site, recipe=study.teacher
    )
    teachers = teachers.without(retired | silent_voters(config, ledger, teachers.served))
    foreign = _foreign(ledger, study, directory / "teachers")
    check_trained(config, study, ledger, teachers.served)
    served = [foreign[slot].declared.served if slot in foreign else own for slot, own in enumerate(teachers.served)]
    return Worker(
        config=config,
        consent=Consent.of(study),
        ledger=ledger,
        voters=TeacherVoters(teachers, study.data, foreign),
        fetch=fetch or PublicObjects(config).get,
        teachers=ledger.state_teachers(served),
        loaded_at=loaded_at,
        tick_s=REPLY_TICK_S,
        declined=directory / DECLINED,
        sleep=sleep,
        note_peers=partial(note_offered, directory, study=study.id, ledger=ledger),
        witness=Witnessing(
            config.books_dir / WITNESSES,
            site=config.site,
            ledger=ledger,
            server_keys=config.server.signing_public_keys,
        ),
        elsewhere=partial(ids_elsewhere, config),
    )


def _foreign(ledger: SiteLedger, study: Study, teachers: Path) -> dict[int, ForeignTeacher]:
    """Load the teachers that the hospital added from elsewhere and that may vote, by voter.

    Raises InvalidInput if the study's unit of privacy is the patient, or if an added teacher is not the one on record.
    """
    voters = [voter for voter in range(study.privacy.voters_per_site) if has_foreign(teachers, voter)]
    if voters:
        check_unit(study)
    found = {voter: ForeignTeacher.load(voter_directory(teachers, voter), study.data) for voter in voters}
    for voter, teacher in found.items():
        if (voter, teacher.declared.served) not in ledger.books.teachers.foreign:
            raise InvalidInput(
                "the declaration of an added teacher differs from the one on record",
                value=f"voter {voter}",
                remedy="add the teacher again with `consilium site teacher add`",
            )
    votes = ledger.books.teachers.brought
    silent = {voter for voter, teacher in found.items() if not votes(voter, teacher.declared.served)}
    for voter in silent:
        log.warning("event=teacher-silent voter=%d cause=patient-withdrawn remedy='site teacher add'", voter)
    return {voter: teacher for voter, teacher in found.items() if voter not in silent}


def _state_identity(ledger: SiteLedger, directory: Path) -> None:
    """Record what counts as a patient, from the last training's record of cases.

    If that record cannot be read, the worker still starts, because the training itself is on record in the ledger.
    """
    if not has_trained(directory):
        return
    try:
        ledger.state_identity(load_cases(directory).patient_identity)
    except InvalidInput as error:
        log.warning("event=no-identity cause=%s", type(error).__name__)


def run_worker(directory: Path, *, socket: Path) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        directory: The site's directory.
        socket: The Unix socket.
    """
    log_to_stderr()
    stop = stop_on_signals()
    server = serve(open_worker(directory, sleep=stop.wait), socket=socket)
    log.info("event=ready")
    stop.wait()
    server.stop(grace=2).wait()


def main() -> None:
    """Serve until SIGTERM or SIGINT: ``python -m client.operations.serve --site-dir DIR --socket PATH``."""
    parser = argparse.ArgumentParser(description="Serve a site's teachers to its node")
    parser.add_argument("--site-dir", type=Path, required=True, help="the site's directory")
    parser.add_argument("--socket", type=Path, help="Unix socket; by default worker.sock in the site's directory")
    arguments = parser.parse_args()
    try:
        run_worker(arguments.site_dir, socket=arguments.socket or arguments.site_dir / "worker.sock")
    except ConsiliumError as error:  # raised before any query, so it is about the site's files, not a case
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
