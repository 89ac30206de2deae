"""Makes a study that an honest server ran, with its student exported, so that a site can pull it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from common.config import Study, TrainingConfig
from common.events import EventLog
from common.models.unet import build_unet, save_weights
from server.postprocess.bundle import export_student
from server.public.public_files import STUDENTS, said_file
from tests.federation import Federation, make_study


def exported_study(root: Path, terms: Study | None = None) -> Federation:
    """Return the study's federation in ``root``, with receipts at the sites; its tiny network is untrained."""
    study = replace(terms or make_study(), student=TrainingConfig(channels=(4, 8), steps=1))
    federation = Federation(root, study=study)
    federation.take_images()
    federation.core().run(federation.transport)
    workspace = federation.workspace()
    workspace.save_sites(federation.sites)
    workspace.signing_key_file.parent.mkdir()
    pem = federation.signing_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    workspace.signing_key_file.touch(mode=0o600)
    workspace.signing_key_file.write_bytes(pem)
    save_weights(workspace.student_dir / "weights.pt", build_unet((4, 8), in_channels=1, out_channels=2, seed=5))
    export_student(workspace, events=EventLog(federation.events_file, study=study.id))
    return federation


def statement_file(federation: Federation) -> Path:
    """Return the file in which the server signed a statement about the exported student."""
    return said_file(federation.root / "objects", STUDENTS, federation.study.id)
