"""Study files to start from, by name: ``consilium study template NAME`` prints one. Refuses a name it does not know."""

from __future__ import annotations

from pathlib import Path

from common.errors import InvalidInput

_FOLDER = Path(__file__).parent


def names() -> tuple[str, ...]:
    """The templates there are."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def template(name: str) -> str:
    """The text of a study file, with comments, that ``common.config.parse_study`` reads."""
    if name not in names():
        raise InvalidInput("study template", value=name, limit=", ".join(names()))
    return (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")
