"""Provides study files to start from, by name; `consilium study template NAME` prints one. It refuses an unknown
name.
"""

from __future__ import annotations

from pathlib import Path

from common.errors import InvalidInput

_FOLDER = Path(__file__).parent


def names() -> tuple[str, ...]:
    """Return the names of the templates, sorted.

    >>> all(template(name) for name in names())
    True
    """
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def template(name: str) -> str:
    """Return the text of a study file with comments, which ``common.config.parse_study`` reads.

    Args:
        name: One of :func:`names`.

    Raises:
        InvalidInput: If there is no such template.
    """
    if name not in names():
        raise InvalidInput("study template", value=name, limit=", ".join(names()))
    return (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")
