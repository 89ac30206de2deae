"""Readers' questions, and the shortest way to each answer by the links of the built site."""

from __future__ import annotations

import heapq
import os
import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from markdown import markdown

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
WALKS = {
    "What does the operator see of my hospital?": (
        "privacy.html#who-sees-what-and-which-ε-holds",
        "The server's operator",
    ),
    "How do I take part?": ("deployment.html#at-a-hospital-from-the-kit-to-connected", "consilium site init"),
    "What does it cost in accuracy?": ("utility.html", "gain over the best control"),
    "How do I add a codec?": ("contributing.html#a-codec", "common/codecs/mirror.py"),
    "What do I do about this alarm?": ("runbook.html#alarms-of-the-dashboard", "quorum-missed"),
    "My certificate expired.": ("runbook.html#alarms-of-the-dashboard", "consilium provision renew"),
    "How do I leave the study?": ("start/hospital.html#questions", "consilium site pause"),
    "What is ε for my hospital, in words?": ("concepts/guarantee.html", "a guess is right at most"),
    "Which data formats?": ("data.html#layouts", "dataset.json"),
    "Can I use my own model?": ("deployment.html#a-teacher-you-already-have", "a MONAI bundle"),
    "A key of ours was stolen.": ("ledger.html#keys", "A stolen signing key"),
    "How large may a volume be?": ("data.html#large-volumes", "2²⁴ voxels"),
    "How many hospitals does it take?": ("start/operator.html", "three for a"),
    "How long does a study take?": ("start/operator.html", "minutes at the server"),
    "May we publish the student?": ("concepts/student.html", "may be published"),
    "The server was rebooted in mid-study.": ("deployment.html#when-something-fails", "killed or rebooted"),
    "Somebody stole the server's disk.": ("privacy.html#who-sees-what-and-which-ε-holds", "Whoever steals the server"),
    "One patient wants out.": ("start/hospital.html#questions", "withdraw-patient"),
    "Delete what the server holds of us.": ("deployment.html#renewing-revoking-deleting", "provision forget"),
    "How do I put the dashboard behind our proxy?": (
        "dashboard.html#in-a-container-behind-a-proxy",
        "--behind-proxy",
    ),
}
"""A reader's question → where its answer stands, and the words of it. The last fifteen stand in no list."""
WORDS = 690
"""The most that anybody reads from the front to an answer, each page down to the link: three minutes at 230 words."""


def words(html: str) -> int:
    return len(re.sub(r"<[^>]+>", " ", html).split())


@cache
def page(site: Path, name: str) -> str:
    """A page's own text, from its title to its end."""
    if name == "README":
        linked = README.replace("(CONTRIBUTING.md)", "(docs/contributing.md)")
        return re.sub(r"docs/([\w/-]+)\.md", r"\1.html", markdown(linked, extensions=["tables", "fenced_code"]))
    html = (site / name).read_text(encoding="utf-8")
    return html[html.index("<article") : html.index("</article>")]


@cache
def text_from(site: Path, place: str) -> str:
    """A page's own text, from the anchor on that the place names."""
    name, _, anchor = place.partition("#")
    text = page(site, name)
    return text[text.index(f'id="{anchor}"') if anchor else 0 :]


@cache
def links(site: Path, place: str) -> tuple[tuple[str, int], ...]:
    """The places that a text leads to, each with the words that are read before its link."""
    text, name, found = text_from(site, place), place.partition("#")[0], []
    for link in re.finditer(r'<a [^>]*?href="([^"]+)"', text):
        path, _, to = link[1].partition("#")
        target = os.path.normpath(os.path.join(os.path.dirname(name), path)) if path else name
        if "//" not in link[1] and target.endswith(".html") and (site / target).exists():
            found.append((target + (f"#{unquote(to)}" if to else ""), words(text[: link.start()])))
    return tuple(found)


def walk(site: Path, start: str, wanted: str, answer: str) -> tuple[int, int, list[str]]:
    """Fewest clicks by links in the pages' own text, with the words read on the way and down to the answer's."""
    queue: list[tuple[int, int, list[str]]] = [(0, 0, [start])]
    seen = set()
    while queue:
        count, read, way = heapq.heappop(queue)
        if way[-1] in seen:
            continue
        seen.add(way[-1])
        if way[-1] == wanted:
            to_answer = re.sub(r"<[^>]+>", "", text_from(site, wanted).split("<h2")[0]).replace("\n", " ")
            assert answer in to_answer, (wanted, answer)
            return count, read + len(to_answer.split(answer)[0].split()), way
        for place, before in links(site, way[-1]):
            heapq.heappush(queue, (count + 1, read + before, [*way, place]))
    raise AssertionError(f"no link leads to {wanted}")
