"""Counts the size of the code base: ``python -m benchmarks.house [--folders] [REVISION …]``.

It reads only Python sources from git. Lines are non-blank lines, including docstrings and comments. The length of a
function counts every line, that of a module all but docstrings. Research is counted separately, wherever it was at the
time, and so are tests and benchmarks. ``--folders`` prints the lines of every folder of the product.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
from collections.abc import Iterator

PACKAGES = ("common", "server", "client", "consilium")
LONG_FUNCTION, LONG_MODULE = 50, 450
RESEARCH = ("research/", "consilium/research/", "consilium/cli/bench", "consilium/bench/")
BESIDE = ("tests/", "benchmarks/")


def sources(revision: str) -> dict[str, str]:
    """Return the Python files of a revision, by path."""
    command = ["git", "archive", revision]
    with tarfile.open(fileobj=io.BytesIO(subprocess.run(command, capture_output=True, check=True).stdout)) as archive:
        files = [member for member in archive if member.isfile() and member.name.endswith(".py")]
        return {member.name: archive.extractfile(member).read().decode() for member in files}  # type: ignore[union-attr]


def lines_but_docstrings(text: str) -> int:
    """Return the number of a module's lines without its docstrings."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    found = [node.body[0] for node in nodes if ast.get_docstring(node, clean=False)]
    return len(text.splitlines()) - sum((each.end_lineno or each.lineno) - each.lineno + 1 for each in found)


def imported(tree: ast.Module, modules: set[str]) -> Iterator[str]:
    """Yield those of ``modules`` that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in whole if name in modules)
            if node.module in modules and not all(name in modules for name in whole):
                yield node.module


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the groups of modules of which each imports every other, directly or indirectly.

    >>> circles({"a": {"b"}, "b": {"a"}, "c": {"a"}}) == {frozenset({"a", "b"})}
    True
    """
    reach = {name: set(others) for name, others in graph.items()}
    for middle in graph:
        for ends in reach.values():
            if middle in ends:
                ends |= reach[middle]
    groups = (frozenset({name} | {other for other in reach[name] if name in reach[other]}) for name in graph)
    return {group for group in groups if len(group) > 1}


def product(files: dict[str, str]) -> dict[str, str]:
    """Return the files of the four packages without research."""
    return {
        name: text for name, text in files.items() if name.split("/")[0] in PACKAGES and not name.startswith(RESEARCH)
    }


def folders(revision: str) -> dict[str, int]:
    """Count non-blank lines of each folder, of the product, of research and of each other top-level folder."""
    found: dict[str, int] = {}
    for name, text in product(files := sources(revision)).items():
        folder = "/".join(name.split("/")[:-1][:2]) + "/"
        found[folder] = found.get(folder, 0) + non_blank(text)
    beside = {"research": RESEARCH, **{name: (name,) for name in BESIDE}}
    of = {what: sum(non_blank(files[n]) for n in files if n.startswith(starts)) for what, starts in beside.items()}
    return {**dict(sorted(found.items())), "product": sum(found.values()), **of}


def figures(revision: str) -> dict[str, int]:
    """Return one revision's column of the table."""
    files = product(sources(revision))
    trees = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): ast.parse(files[name]) for name in files
    }
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    conditions = [node.test for node in nodes if isinstance(node, ast.If | ast.IfExp)]
    graph = {name: set(imported(tree, set(trees))) - {name} for name, tree in trees.items()}
    return {
        "modules": len(files),
        "non-blank lines": sum(map(non_blank, files.values())),
        f"functions over {LONG_FUNCTION} lines": sum(
            (node.end_lineno or 0) - node.lineno >= LONG_FUNCTION for node in functions
        ),
        f"modules over {LONG_MODULE} lines": sum(lines_but_docstrings(text) > LONG_MODULE for text in files.values()),
        "import circles": len(circles(graph)),
        "conditions on codec.joint": sum(
            any(isinstance(part, ast.Attribute) and part.attr == "joint" for part in ast.walk(test))
            for test in conditions
        ),
    }


def non_blank(text: str) -> int:
    """Return the number of non-blank lines."""
    return sum(bool(line.strip()) for line in text.splitlines())


def main(words: list[str]) -> None:
    revisions = [word for word in words if word != "--folders"] or ["HEAD"]
    columns = [(folders if "--folders" in words else figures)(revision) for revision in revisions]
    print("| | " + " | ".join(revisions) + " |\n|" + "---|" * (len(revisions) + 1))
    for what in dict.fromkeys(name for column in columns for name in column):
        print(f"| {what} | " + " | ".join(f"{column.get(what, 0):,}" for column in columns) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
