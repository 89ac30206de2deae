"""Makes the reference of both configuration files from the code.

``python -m tests.configuration_reference`` writes docs/configuration.md.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from enum import Enum
from pathlib import Path

from client import policy
from client.data.layouts import DatasetSettings
from common import config

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
SITE: dict[str, type] = {
    "": policy.SiteConfig,
    "server": policy.ServerFacts,
    "caps": policy.Caps,
    "allow": policy.AllowLists,
    "share": policy.SharingPolicy,
    "dataset": DatasetSettings,
}
OF_A_DIRECTORY = {"server", "caps", "allow", "dataset", "share", "root", "holder"}
"""Fields of a site that are sections of their own, or that are no key of the file."""

HEAD = f"""# Configuration

For people who edit `study.toml` or `site.toml`. After this page you know every key, its type, its default and its
meaning.

Both files are TOML. An unknown key, a missing key or a value outside its limits is refused, with the key, the value and
the limit.
Written by `python -m tests.configuration_reference`.

## study.toml

`consilium study init` writes it; `schema = 1` and `name` stand at its top. A hospital consents to the name and to
{", ".join(f"`[{name}]`" for name in config.CONSENTED)}: changing one makes another study. The rest changes no
guarantee.
"""
OF_A_SITE = """
## site.toml

`consilium site init` writes it. It is the hospital's policy, and no message from the server changes it. `schema = 1`
stands at its top, `[labels]`, `[channels]` and `[bids.CONTRAST]` map the dataset's own names ([data](data.md)).
"""


def reference() -> str:
    """Return the whole document."""
    study = "".join(section(name, kind) for name, kind in config.SECTIONS.items())
    return HEAD + study + OF_A_SITE + "".join(section(name, kind) for name, kind in SITE.items())


def keys(name: str, kind: type) -> list[dataclasses.Field]:
    """Return the keys that a section may have."""
    hidden = OF_A_DIRECTORY if not name else {"labels", "channels", "choice"} if name == "dataset" else set()
    return [each for each in dataclasses.fields(kind) if each.init and each.name not in hidden]


def section(name: str, kind: type) -> str:
    """Return one section of a file: the class's description, and a row for each key."""
    text, said = described(kind)
    head = "| key | type | default |" + (" what it is |" if said else "") + f"\n|{'---|' * (4 if said else 3)}\n"
    rows = "".join(
        f"| `{each.name}` | {type_of(each)} | {default_of(each, student=name == 'student')} |"
        + (f" {said.get(each.name, '')} |\n" if said else "\n")
        for each in keys(name, kind)
    )
    title = f"\n### [{name}]\n\n" if name else "\n### at the top\n\n"
    return f"{title}{text}\n\n{head}{rows}"


def described(kind: type) -> tuple[str, dict[str, str]]:
    """Return a class's docstring as paragraphs without errors and examples, and its attributes by name."""
    blocks = [each for each in inspect.cleandoc(kind.__doc__ or "").split("\n\n") if not each.startswith(">>>")]
    said: dict[str, str] = {}
    for block in blocks:
        if block.startswith("Attributes:"):
            for name, words in re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", block, re.MULTILINE):
                said[name] = _plain(words)
    return "\n\n".join(_plain(each) for each in blocks if not re.match(r"(Attributes|Raises):", each)), said


def _plain(text: str) -> str:
    return re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", " ".join(text.split())).replace("``", "`")


def type_of(field: dataclasses.Field) -> str:
    named = str(field.type)
    words = {"str": "text", "bool": "true or false", "int": "integer", "float": "number"}
    if named in words:
        return words[named]
    if match := re.match(r"tuple\[(\w+)", named):
        return f"list of {words[match[1]]}s"
    kind = getattr(config, named, None)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f"`{each.value}`" for each in kind)
    return "text"


def default_of(field: dataclasses.Field, *, student: bool) -> str:
    value = getattr(config.STUDENT_RECIPE, field.name) if student else field.default
    if value is dataclasses.MISSING:
        return "must be given" if field.default_factory is dataclasses.MISSING else ""
    if isinstance(value, Enum):
        value = value.value
    if value is None:
        return ""
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"


if __name__ == "__main__":
    DOCUMENT.write_text(reference(), encoding="utf-8")
