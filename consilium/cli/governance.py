"""Defines ``consilium governance``: writes drafts of the documents that a hospital and its ethics board ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.options import PublicKey, StudyDir, folder_to_write, say_not_anchored
from consilium.cli.say import say
from server.study.workspace import Workspace

app = typer.Typer(add_completion=False)


@app.command("governance")
def governance(
    directory: StudyDir,
    out: Annotated[
        Path, typer.Option(help="Folder for the documents, each as .md, .json and .pdf.", callback=folder_to_write)
    ],
    public_key: PublicKey = None,
) -> None:
    """Write drafts of the documents that data protection asks for. People fill in the marked blanks.

    dpia (impact assessment), nist-800-226 (checklist), registry (entry for a registry of deployments), egress (what
    left the hospitals, when, at which charge), processing (record of processing). All facts come from the ledger and
    the study. Without --public-key the ledger's signatures are checked only with the key that the ledger itself names,
    and the documents say so. Exit code 5: nothing is written, because the ledger does not verify.

    Example: consilium governance trial --out papers --public-key 3f1c…e9
    """
    from common.ledger.keys import read_public_key
    from common.objects import write_atomically
    from common.wording import many
    from consilium.reports.governance import papers

    key = None if public_key is None else read_public_key(public_key)
    made = [(paper, paper.pdf()) for paper in papers(Workspace(directory), public_key=key)]
    out.mkdir(parents=True, exist_ok=True)
    for paper, pdf in made:
        text = json.dumps(paper.to_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        for ending, data in (("md", paper.markdown().encode()), ("json", text.encode()), ("pdf", pdf)):
            write_atomically(out / f"{paper.name}.{ending}", data)
        say(f"{out / paper.name}.md, .json, .pdf: {many(len(paper.blanks), 'blank')} to fill in")
    if key is None:
        say_not_anchored("this set of documents")
