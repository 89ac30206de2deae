"""Assigns a role to every number in a text or document: every ε, chance and share that is printed anywhere.

A number without a rule is a failure: a new place, or a new sentence in an old one, must say here what it states.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

N = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
EPSILON = re.compile(rf"ε ?(?:=|≤)? ?{N}|\(ε, δ\) = \({N}")
CHANCE = re.compile(rf"right at most {N} %")
ACCOUNTANT = {"exact Gaussian": "exact", "Rényi DP": "rdp", "paper's formula": "paper", "The exact curve": "exact"}
PLAN = "plan"
"""The role of a figure that is planned or declared, and not spent."""


@dataclass(frozen=True)
class Said:
    """Holds a printed figure: its role, its value, and the place where it was read."""

    role: str
    value: float
    written: bool
    where: str
    percent: bool = False


@dataclass(frozen=True)
class Rule:
    """Finds figures in a line that matches ``line``; ``inside`` searches its group ``part``. ``roles`` has one role for
    each number.

    ``{name}`` in a role is a named group of either.
    """

    line: str
    roles: tuple[str, ...]
    inside: str = ""
    part: str = ""


RULES = (
    # the guarantee and what was spent, in lines
    Rule(rf"^guaranteed ε = {N} \(\w+\)", ("guaranteed",)),
    Rule(rf"^guaranteed: not known.*; ε = {N} \(\w+\) at the least", ("guaranteed",)),
    Rule(
        r"^spent (?:of it |at least )?(?P<list>ε = .*)$",
        ("spent:{by}",),
        rf"ε = {N} \((?P<by>exact|rdp|paper)\)",
        "list",
    ),
    Rule(rf"^(?!(?:aachen|bergen|cadiz)\b).*?budget of ε = {N} admits: ε = {N} \(", ("budget", "spent:gate")),
    Rule(
        rf"^(?P<site>aachen|bergen|cadiz)\b.*?budget of ε = {N} admits: ε = {N} \(",
        ("cap:{site}-mri", "pool:gate:{site}-mri"),
    ),
    Rule(rf"^Guaranteed: +ε = {N} ", ("guaranteed",)),
    Rule(rf"^Spent of it: ε = {N} |^Spent, more than the budget: ε = {N} ", ("spent:gate", "spent:gate")),
    Rule(rf"How nearly the same is what ε = {N} and", ("guaranteed",)),
    Rule(rf"charges left, (?:at least )?ε = {N} of {N} spent \(", ("spent:gate", "budget")),
    # terms and consent
    Rule(rf"^budget ε = {N} \(", ("budget",)),
    Rule(r"^whole plan: (?P<list>.*)$", (PLAN,), rf"ε = {N}", "list"),
    Rule(rf"(?:^|GUARANTEED )ε = {N} \(\w+ accountant\), δ = \S+, unit", ("budget",)),
    Rule(rf"^ε = {N} at δ = \S+, \w+ accountant, unit", ("budget",)),
    Rule(rf"(?:A|Your) patient pool[^.]* may spend ε = {N} \(", ("budget",)),  # no study of a life states more
    # odds and groups
    Rule(rf"is right at most {N} % of the time; a coin", ("odds:guaranteed",)),
    Rule(rf"After what was released so far, such a guess is right at most {N} %", ("odds:spent",)),
    Rule(r"hidden less well: ε = (?P<list>[^(]*)\(", ("group:{g}",), rf"{N} for (?P<g>\d)", "list"),
    # a sealed sum
    Rule(rf"(?:^|\. )ε = {N} holds against", ("sealed:t",)),
    Rule(rf"faces more noise: ε = {N} if", ("sealed:none",)),
    Rule(rf"closer this comes to ε = {N}", ("sealed:t",)),
    Rule(rf"guarantee is weaker: ε = {N} for", ("sealed:more",)),
    # the Study page's table
    Rule(rf"^Anybody who sees everything that this study releases ε = {N}$", ("guaranteed",)),
    Rule(rf"the server's operator too, of \d+ hospitals ε = {N}$", ("sealed:none",)),
    Rule(rf"^The server's operator together with 1 of the hospitals ε = {N}$", ("sealed:t",)),
    Rule(rf"^The server's operator together with 2 of the hospitals ε = {N}$", ("sealed:more",)),
    Rule(rf"^Anybody, of two \w+ whose data change together ε = {N}$", ("group:2",)),
    # ledgers
    Rule(
        r"pool (?P<pool>\S+): \d+ releases?, .*? of the Σμ² that its budget admits: (?P<list>.*)$",
        ("pool:{by}:{pool}",),
        rf"ε = {N} \((?P<by>\w+)\)",
        "list",
    ),
    Rule(
        r"pool (?P<pool>\S+): \d+ releases?, (?P<list>ε = .*)$",
        ("pool:{by}:{pool}",),
        rf"ε = {N} \((?P<by>\w+)\)",
        "list",
    ),
    Rule(rf"pool \S+ of \S+, ε ≤ {N}", (PLAN,)),
    # the dashboard
    Rule(
        r"^(?P<site>aachen|bergen|cadiz)\b(?P<list>.*)$",
        ("pool:gate:{site}-mri", "cap:{site}-mri"),
        rf"ε {N} of {N}\b",
        "list",
    ),
    Rule(
        r"^(?P<site>aachen|bergen|cadiz)\b(?P<list>.*)$",
        ("in-study:{site}-mri",),
        rf"in this one (?:at least )?ε {N}",
        "list",
    ),
    Rule(
        r"^(?P<name>first|second)\b(?P<list>.*)$",
        ("@{name} spent:gate", "@{name} budget"),
        rf"ε (?:= )?{N} of {N}\b",
        "list",
    ),
    Rule(rf"^(?:at least )?ε {N} of {N} spent", ("spent:gate", "budget")),
    Rule(rf"guaranteed even after all further queries: ε {N}\.", ("guaranteed",)),
    Rule(rf"(?P<name>Rényi DP|The exact curve) reads ε {N}\.", ("spent:{name}",)),
    Rule(rf"^(?P<name>exact Gaussian|Rényi DP|paper's formula) {N} ", ("spent:{name}",)),
    Rule(rf"decides ?, guaranteed {N}$", ("guaranteed",)),
    # the bundle
    Rule(rf"^Guaranteed by the study: \(ε, δ\) = \({N}", ("guaranteed",)),
    Rule(rf"^Spent of it when this was exported: \(ε, δ\) = \({N}", ("spent:gate",)),
    # the report
    Rule(rf"^The guarantee ε = {N} ", ("guaranteed",)),
    Rule(rf"by the other accountant the same releases spent ε = {N}, (?P<by>\w+) accountant", ("spent:{by}",)),
    Rule(rf"ε = {N} spent of planned ε = {N}", ("spent:gate", "budget")),
    # the certificate's tables
    Rule(rf"^Guaranteed; ε = {N};", ("guaranteed",)),
    Rule(rf"^Spent so far, by the (?P<by>\w+) accountant; ε = {N};", ("spent:{by}",)),
    Rule(rf"^Sealed sum, no share; ε = {N};", ("sealed:none",)),
    Rule(rf"^Sealed sum, shares that may be known; ε = {N};", ("sealed:t",)),
    Rule(rf"^Sealed sum, one share more; ε = {N};", ("sealed:more",)),
    Rule(rf"^Guaranteed for (?P<g>\d) \w+ that change together; ε = {N};", ("group:{g}",)),
    Rule(
        rf"^pool's row (?P<pool>\S+): ε = {N} \(\w+\), \d+ releases?; ε = {N} of {N} \(",
        ("in-study:{pool}", "pool:gate:{pool}", "cap:{pool}"),
    ),
)
"""Rules, each tried on every line. A test reports rules for texts that the product no longer prints."""

USED: set[int] = set()
"""Numbers of the rules that matched something."""


def of_text(text: str, where: str) -> Iterator[Said]:
    """Yield every figure of a text, line by line. Raise AssertionError for a number without a rule."""
    for line in text.splitlines():
        line = re.sub(r"\s+", " ", line).strip()
        known: set[int] = set()
        for number, rule in enumerate(RULES):
            for outer in re.finditer(rule.line, line):
                inner = [outer] if not rule.inside else re.finditer(rule.inside, outer[rule.part])
                start = outer.start(rule.part) if rule.inside else 0
                for found in inner:
                    names = {**outer.groupdict(), **found.groupdict()}
                    names = {key: ACCOUNTANT.get(value or "", value) for key, value in names.items()}
                    numbers = [at for at in range(1, found.re.groups + 1) if at not in found.re.groupindex.values()]
                    for at, role in zip(numbers, rule.roles, strict=True):
                        if found[at] is None:
                            continue
                        known.add(start + found.start(at))
                        USED.add(number)
                        percent = line[start + found.end(at) :].startswith(" %")
                        value = float(found[at]) / (100 if percent else 1)
                        yield Said(role.format(**names), value, True, f"{where}: {line}", percent)
        for pattern in (EPSILON, CHANCE):
            for found in pattern.finditer(line):
                at = next(at for at in range(1, pattern.groups + 1) if found[at] is not None)
                assert found.start(at) in known, f"{where}: no rule knows {found[0]!r} in: {line}"


FIGURE = re.compile(
    r"epsilon|guess|odds|share|^budget$|budget_text|guarantee|^exact|^rdp|^paper|mu_squared|_ratio|known_twice"
)
"""Names of fields that may hold a figure."""


NO_FIGURE = ("delta", "group")
"""Fields beside a figure that are no figures themselves."""


def of_document(document: Any, where: str, roles: dict[str, str]) -> Iterator[Said]:
    """Yield every figure of a document. Raise AssertionError for a field that no path of ``roles`` matches.

    ``roles``: by a path as a regular expression, whose groups a role may name; a role of "" is no figure.
    """
    for path, value, around in leaves(document):
        key = path.rpartition(".")[2]
        if isinstance(value, str) and re.search(r"ε|right at most", value):
            named = around.get("name", "")
            is_site = named in ("aachen", "bergen", "cadiz")
            yield from of_text(f"{named} {value}" if is_site else value, f"{where} {path}")
        elif (
            key not in NO_FIGURE
            and FIGURE.search(path)
            and not isinstance(value, bool)
            and value is not None
            and _number(value) is not None
        ):
            found = next(((m, role) for one, role in roles.items() if (m := re.fullmatch(one, path))), None)
            assert found is not None, f"{where}: no role for {path} = {value!r}"
            match, role = found
            names = {**around, **match.groupdict()}
            if role:
                yield Said(role.format(**names), float(value), isinstance(value, str), f"{where} {path} ({key})")


def leaves(
    document: Any, path: str = "", around: dict[str, Any] | None = None
) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield every value with its path, and the texts beside and around it."""
    around = around or {}
    if isinstance(document, dict):
        beside = {**around, **{key: value for key, value in document.items() if isinstance(value, str | int)}}
        for key, value in document.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key), beside)
    elif isinstance(document, list | tuple):
        for number, value in enumerate(document):
            yield from leaves(value, f"{path}.{number}" if path else str(number), around)
    else:
        yield path, document, around


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def lines_of(page: str) -> str:
    """Return a page's text as it is read or spoken: a line for each row, paragraph and item."""
    body = page.partition("<body")[2].partition(">")[2]
    body = re.sub(r"(?s)<script\b.*?</script>", "", body)
    body = re.sub(r"\s+", " ", body)
    body = re.sub(r'<svg[^>]*aria-label="([^"]*)"[^>]*>', r" \1 ", body)
    body = re.sub(r"(?i)</?(?:tr|p|li|section|div|dl|dt|dd|h\d|table|thead|tbody|ul|ol|pre)\b[^>]*>", "\n", body)
    lines = (re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", line))).strip() for line in body.splitlines())
    return "\n".join(line for line in lines if line)
