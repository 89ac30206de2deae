"""Lists readers' questions, and finds the shortest way to each answer by the links of the built site."""

from __future__ import annotations

import os
import re
from collections import deque
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from markdown import markdown

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
WALKS = {
    "What does the operator see of my hospital?": "privacy.html#who-sees-what-and-which-ε-holds",
    "How do I take part?": "deployment.html#at-a-hospital-from-the-kit-to-connected",
    "What does it cost in accuracy?": "utility.html",
    "How do I add a codec?": "contributing.html#a-codec",
    "What do I do about this alarm?": "runbook.html#alarms-of-the-dashboard",
    "My certificate expired.": "runbook.html#alarms-of-the-dashboard",
    "How do I leave the study?": "start/hospital.html#questions",
    "What is ε for my hospital, in words?": "concepts/guarantee.html",
    "Which data formats?": "data.html#layouts",
    "Can I use my own model?": "deployment.html#a-teacher-you-already-have",
    "A key of ours was stolen.": "ledger.html#keys",
    "How large may a volume be?": "data.html#large-volumes",
    "How many hospitals does it take?": "start/operator.html",
    "How long does a study take?": "start/operator.html",
    "May we publish the student?": "concepts/student.html",
    "The server was rebooted in mid-study.": "deployment.html#when-something-fails",
    "Somebody stole the server's disk.": "privacy.html#who-sees-what-and-which-ε-holds",
    "One patient wants out.": "start/hospital.html#questions",
    "Delete what the server holds of us.": "deployment.html#renewing-revoking-deleting",
    "How do I put the dashboard behind our proxy?": "dashboard.html#in-a-container-behind-a-proxy",
    # Five readers, three questions each: hospital IT, operator, scientist, privacy officer, contributor.
    "May our proxy inspect the connection?": "hospital-systems.html#a-proxy-and-one-that-inspects-tls",
    "We restored last week's backup of the site.": "ledger.html#a-sites-own-ledger-restored-from-an-older-copy",
    "How do these events reach our log system?": "security-log.html#where-it-goes",
    "The run stopped over a spoiled draw.": "runbook.html#a-spoiled-draw",
    "Can a second study use the same port?": "deployment.html#several-studies-at-one-address",
    "Which of my files must nobody get?": "start/operator.html#what-you-must-guard",
    "Does a hospital with ten labelled patients gain?": "utility.html#who-gains-by-taking-part",
    "What is asked about structures without a fixed place?": "utility.html#what-a-study-asks",
    "How do I price releases in Python?": "api.html#what-releases-cost",
    "What leaves a hospital under no ε?": "privacy.html#what-is-released-for-free",
    "Which papers do we get for the ethics board?": "governance.html",
    "What does ε become for a patient of two hospitals?": "concepts/guarantee.html#groups",
    "Which test fails when clipping is left out?": "lab/privacy-mutants.html",
    "How do I add a key to a study's file?": "contributing.html#add-a-key-to-a-studys-file",
    "Why no existing secure aggregation?": "adr/0022-sealed-sum.html",
}
"""A reader's question → the page and heading with its answer."""


@cache
def page(site: Path, name: str) -> str:
    """Return a page's own text, from its title to its end."""
    if name == "README":
        linked = README.replace("(CONTRIBUTING.md)", "(docs/contributing.md)")
        return re.sub(r"docs/([\w/-]+)\.md", r"\1.html", markdown(linked, extensions=["tables", "fenced_code"]))
    html = (site / name).read_text(encoding="utf-8")
    return html[html.index("<article") : html.index("</article>")]


@cache
def text_from(site: Path, place: str) -> str:
    """Return a page's own text from the place's anchor on."""
    name, _, anchor = place.partition("#")
    text = page(site, name)
    return text[text.index(f'id="{anchor}"') if anchor else 0 :]


@cache
def links(site: Path, place: str) -> tuple[str, ...]:
    """Return the targets of the links in a page's own text, from the place on."""
    text, name, found = text_from(site, place), place.partition("#")[0], []
    for link in re.findall(r'<a [^>]*?href="([^"]+)"', text):
        path, _, to = link.partition("#")
        target = os.path.normpath(os.path.join(os.path.dirname(name), path)) if path else name
        if "//" not in link and target.endswith(".html") and (site / target).exists():
            found.append(target + (f"#{unquote(to)}" if to else ""))
    return tuple(found)


def walk(site: Path, start: str, wanted: str) -> list[str]:
    """Return the pages on the shortest way to a place by links in the pages' own text; each step is one click."""
    ways, seen = deque([[start]]), {start}
    while ways:
        way = ways.popleft()
        if way[-1] == wanted:
            return way
        for place in links(site, way[-1]):
            if place not in seen:
                seen.add(place)
                ways.append([*way, place])
    raise AssertionError(f"no link leads to {wanted}")
