"""Defines ``consilium certificate``: writes a study's releases, ε and answering hospitals as PDF and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from common.wording import many
from consilium.cli.options import PublicKey, StudyDir, folder_to_write, say_not_anchored
from consilium.cli.say import say
from server.study.workspace import Workspace

app = typer.Typer(add_completion=False)


@app.command("certificate")
def certificate(
    directory: StudyDir,
    out: Annotated[
        Path, typer.Option(help="Folder for certificate.pdf and certificate.json.", callback=folder_to_write)
    ],
    audit: Annotated[
        Path | None,
        typer.Option(
            help="File with the output of `consilium audit --json`; by default audit.json in the study's directory."
        ),
    ] = None,
    site: Annotated[
        list[Path] | None,
        typer.Option(
            help="File with the output of `consilium site status --json` at a hospital; repeatable; by "
            "default site-reports/*.json."
        ),
    ] = None,
    reports: Annotated[
        Path | None,
        typer.Option(
            help="Another folder with outputs of `consilium site status --json`, each named after its site, such as "
            "the dashboard's folder."
        ),
    ] = None,
    public_key: PublicKey = None,
    copy: Annotated[
        bool, typer.Option(help="Keep a copy in the study's directory, where the dashboard shows it.")
    ] = True,
) -> None:
    """Write a study's privacy certificate for filing. Exit code 5: no certificate, because the ledger does not verify.

    Without --public-key the ledger's signatures are checked only with the key that the ledger itself names, and the
    certificate says so. The certificate is not signed; `student publish` puts it into a signed folder.
    Example: consilium certificate study --out certificate --public-key 3f1c…e9
    """
    from common.ledger.keys import read_public_key
    from consilium.reports.certificate import Sources, issue_certificate

    key = None if public_key is None else read_public_key(public_key)
    sources = Sources(audit=audit, sites=tuple(site or ()), reports=reports, public_key=key)
    issued = issue_certificate(Workspace(directory), out, sources, copy=copy)
    say(f"{issued.pdf}, and the same facts for machines: {issued.json}")
    if copy and not issued.kept:
        say(f"the dashboard does not show this certificate, because {directory} cannot be written", err=True)
    say(f"guaranteed {issued.guaranteed}")
    say(f"spent of it {issued.spent}; {many(issued.answers, 'answer')}")
    if not issued.anchored:
        say_not_anchored("the certificate")
