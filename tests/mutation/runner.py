"""Runs a named test against a changed line of the product, and states whether the test fails.

``python -m tests.mutation.runner`` reads mutants as JSON on standard input and writes each one's outcome. The libraries
are imported once; every mutant then runs in a fork of its own, in which the changed file is compiled in place of the
one on disk. Nothing on disk changes.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KILLED, SURVIVED, BROKEN = "killed", "survived", "broken"
PRELOADED = (
    "pytest",
    "hypothesis",
    "numpy",
    "scipy.stats",
    "scipy.optimize",
    "mpmath",
    "torch",
    "torch.func",
    "monai.networks.nets",
    "dp_accounting.pld",
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """Changes a line: ``before`` stands once in ``file`` and becomes ``after``; ``test`` is the pytest node that must
    fail.

    ``also`` has further changes of the same file, if one line alone makes no mutant.
    """

    name: str
    file: str
    before: str
    after: str
    test: str
    also: tuple[tuple[str, str], ...] = ()

    def changed(self) -> str:
        """Return the file's source with every change. Raise ValueError if a text to change does not stand in
        it once.
        """
        text = (ROOT / self.file).read_text(encoding="utf-8")
        for before, after in ((self.before, self.after), *self.also):
            if text.count(before) != 1:
                raise ValueError(f"{self.name}: stands {text.count(before)} times in {self.file}: {before}")
            text = text.replace(before, after)
        return text


def outcomes(mutants: Sequence[Mutant], *, timeout_s: float) -> dict[str, str]:
    """Run every mutant in a process of its own.

    Args:
        mutants: The changed lines, each with the test that must fail.
        timeout_s: Seconds for all of them together.

    Returns:
        By mutant name: ``killed`` (the test fails), ``survived`` (it passes), or ``broken`` (it cannot run).
    """
    for mutant in mutants:
        mutant.changed()
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutation.runner"],
        input=json.dumps([asdict(mutant) for mutant in mutants]),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module, with its changed source."""

    def __init__(self, mutant: Mutant) -> None:
        self.path = ROOT / mutant.file
        self.module = mutant.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.source = mutant.changed()

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def exec_module(self, module: types.ModuleType) -> None:
        exec(compile(self.source, str(self.path), "exec"), module.__dict__)


def _run(mutant: Mutant) -> str:
    """Return the outcome of one mutant, from a fork."""
    child = os.fork()
    if child == 0:
        code = 99
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        # No test needs other packages' plugins, and pytest refuses Hypothesis's after its import.
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        with contextlib.suppress(BaseException):
            import pytest

            sys.meta_path.insert(0, _Changed(mutant))
            code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", mutant.test]))
        os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {0: SURVIVED, 1: KILLED}.get(status, BROKEN)


def main(mutants: Iterable[Mutant]) -> dict[str, str]:
    """Print the outcome of every mutant. The libraries are imported once for all."""
    for name in PRELOADED:
        importlib.import_module(name)
    return {mutant.name: _run(mutant) for mutant in mutants}


if __name__ == "__main__":
    print(json.dumps(main([Mutant(**fields) for fields in json.load(sys.stdin)])))
