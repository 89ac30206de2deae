"""Tests that no source file rounds an ε, a δ or noise by itself, but uses ``common.privacy.figures``.

The tests search by syntax, so a new place that prints a privacy figure in its own format fails here. Names of files and
identifiers may contain a setting as it was typed. Measured and plotted quantities that are no ε may be rounded.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("common", "server", "client", "consilium", "research", "benchmarks")
FIGURES = "common/privacy/figures.py"

NAME = re.compile(r"(^|_)(epsilons?|eps|deltas?|budget|cap|noise(_\w+)?)(_|$)")
"""Words of a name for an ε, a δ or a size of noise, alone or between underscores; ``timedelta`` is one word."""
BEFORE = re.compile(
    r"(ε|δ|σ|\bz|noise multiplier|\b(epsilon|delta))\s*\)?\s*(=|≤|<|>|≥|:|of|is|at most|above|below)?\s*$"
)
"""Text that ends just before an ε, a δ, a z or a σ is written."""
ROUNDED = re.compile(r"[.\d,]*[eEfFgGn%]$|\.\d+$")
"""A format specification that rounds."""

KEYS_OF_CELLS = {
    "research/recipes.py:id",
    "research/volumes.py:id",
    "common/privacy/gaussian.py:_between_boundaries",
}
"""Functions that make a file's name from a setting, which must not change, and the sampler's own draw."""


def python_sources() -> list[Path]:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return [path for path in files if path.relative_to(ROOT).as_posix() != FIGURES]


def names_in(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        match part:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                yield name
            case _:
                pass


def is_figure(node: ast.AST) -> bool:
    return any(NAME.search(name) for name in names_in(node))


def roundings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Return (line, source) of everything that rounds an ε or a δ before it is written into a text."""
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr(values=values):
                text = ""
                for value in values:
                    if isinstance(value, ast.Constant):
                        text += str(value.value)
                        continue
                    assert isinstance(value, ast.FormattedValue)
                    spec = ast.unparse(value.format_spec)[2:-1] if value.format_spec else ""
                    if ROUNDED.search(spec) and (is_figure(value.value) or BEFORE.search(text)):
                        yield value.lineno, ast.unparse(value.value)
                    text += "…"
            case ast.Call(func=ast.Name(id="round" | "format"), args=[first, *_]) if is_figure(first):
                yield node.lineno, ast.unparse(node)
            case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="format")):
                if re.search(r"\{[^}]*:[^}]*[efg%]\}", text) and (is_figure(node) or BEFORE.search(text.split("{")[0])):
                    yield node.lineno, ast.unparse(node)
            case ast.BinOp(op=ast.Mod(), left=ast.Constant(value=str(text)), right=right):
                found = re.search(r"%[.\d]*[efg]", text)
                if found and (is_figure(right) or BEFORE.search(text[: found.start()])):
                    yield node.lineno, ast.unparse(node)
            case ast.Call(func=ast.Attribute(attr="quantize" | "create_decimal")) if is_figure(node):
                yield node.lineno, ast.unparse(node)
            case _:
                pass


def within(tree: ast.AST, line: int) -> str:
    """Return the innermost function around a line."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    around = [n for n in ast.walk(tree) if isinstance(n, kinds) and n.lineno <= line <= (n.end_lineno or 0)]
    return max(around, key=lambda n: n.lineno).name if around else ""


TEMPLATE_FIGURE = re.compile(r"\b(\w*epsilon|noise_\w+|delta|budget\.budget|\bb\.budget|cap_epsilon)\b")
TEMPLATE_WRITTEN = re.compile(r"\|\s*(epsilon|delta|noise)\b|written\.|\bb\.words\b")
AS_TYPED = re.compile(r'value="\{\{[^}]*\}\}"|slider\([^)]*\)')


def template_roundings(text: str) -> Iterator[str]:
    """Yield expressions of a template that print an ε or a δ without the filters made of ``epsilon_text``."""
    bare = AS_TYPED.sub("", text)
    for expression in re.findall(r"\{\{(.*?)\}\}", bare, re.S):
        if "%" in expression and re.search(r"'%|\"%", expression) and TEMPLATE_FIGURE.search(expression):
            yield expression
        if TEMPLATE_FIGURE.search(expression) and not TEMPLATE_WRITTEN.search(expression) and "g." not in expression:
            yield expression


def script_roundings(text: str) -> Iterator[str]:
    """Yield top-level pieces of a script that mention ε or δ and round a number, themselves or by a helper."""
    rounding = r"toFixed|toPrecision|toExponential|Math\.(round|ceil|floor)|Intl\.NumberFormat"
    pieces = re.split(r"\n(?=(?:async )?(?:function|const|let)\b)", text)
    helpers = {
        found[1]
        for piece in pieces
        if (found := re.match(r"(?:async )?(?:function|const)\s+(\w+)", piece)) and re.search(rounding, piece)
    }
    by_name = "|".join(map(re.escape, sorted(helpers))) or r"$^"
    for piece in pieces:
        if re.search(r"ε|epsilon", piece):
            yield from re.findall(rf"value: (?:{by_name})\b.*", piece)  # a chart's legend
        for line in piece.splitlines():
            speaks = re.search(r"ε|δ|epsilon|delta\b|budget", line)
            if speaks and re.search(rf"{rounding}|\b(?:{by_name})\(", line) and not line.startswith("function"):
                yield line.strip()


def test_no_python_source_rounds_an_epsilon_a_delta_or_noise_by_itself() -> None:
    found = []
    for path in python_sources():
        name, tree = path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))
        for line, source in roundings(tree):
            if f"{name}:{within(tree, line)}" not in KEYS_OF_CELLS:
                found.append(f"{name}:{line}: {source}")
    assert found == []


def test_no_template_prints_an_epsilon_a_delta_or_noise_but_by_the_filters() -> None:
    templates = [
        *(ROOT / "server/dashboard/templates").rglob("*.html"),
        *(ROOT / "consilium/templates").rglob("*.html"),
    ]
    assert len(templates) > 10
    found = {path.name: list(template_roundings(path.read_text(encoding="utf-8"))) for path in templates}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_no_script_rounds_an_epsilon_or_a_delta() -> None:
    scripts = list((ROOT / "server/dashboard/static").glob("*.js"))
    assert len(scripts) > 2
    found = {path.name: list(script_roundings(path.read_text(encoding="utf-8"))) for path in scripts}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source",
    [
        'f"ε = {value:.4f} ({name})"',
        'f"{self.epsilon:.4g}"',
        'f"δ = {x:g}"',
        "f\"{facts['budget_epsilon']:g}\"",
        'f"z = {z:.3f}"',
        'f"{float(plan.noise_std):.6g} grid steps"',
        "f\"{m['noise_multiplier']:.6g}\"",
        "round(noise_per_coordinate, 3)",
        'f"ε ≤ {number:g}"',
        'f"at most epsilon {limit:g}"',
        "round(spent_epsilon, 4)",
        "format(guarantee.epsilon, '.3f')",
        "'%.3f' % epsilon",
        "'ε = %.3f' % value",
        "'ε = {:.3g}'.format(value)",
    ],
)
def test_the_search_finds_a_rounding_that_is_put_back(source: str) -> None:
    assert list(roundings(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    ['f"{epsilon_text(epsilon)}"', 'f"ε {epsilon}"', 'f"{timedelta:.1f}"', 'f"{noise_text(z)}"', "round(seconds, 2)"],
)
def test_the_search_leaves_other_figures_alone(source: str) -> None:
    assert not list(roundings(ast.parse(source)))


def test_the_search_finds_templates_and_scripts_that_round() -> None:
    for text in (
        "{{ '%g' % b.budget }}",
        "{{ '%.3f'|format(site.epsilon) }}",
        "{{ b.epsilon }}",
        "{{ b.delta | number }}",
        "{{ study.noise_multiplier | number }}",
    ):
        assert list(template_roundings(text)), text
    assert not list(template_roundings("{{ b.epsilon | epsilon }} {{ study.delta | delta }} {{ b.share | percent }}"))
    helper = "const up = (v) => v.toPrecision(4);\nfunction put(plan) {\n  cell = up(plan.epsilon);\n}\n"
    assert list(script_roundings(helper))
    assert list(script_roundings("const line = { label: 'ε', value: v.toFixed(2) };\n"))
    legend = "const fixed = (u, v) => v.toPrecision(4);\nfunction chart(c) {\n  // ε\n  return { value: fixed };\n}\n"
    assert list(script_roundings(legend))
    assert not list(script_roundings("function put(plan) {\n  cell = plan.written.epsilon;\n}\n"))
