"""The reference of both configuration files, made of the code.

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
STUDY: dict[str, type] = {
    "data": config.DataConfig,
    "privacy": config.PrivacyConfig,
    "codec": config.CodecConfig,
    "teacher": config.TrainingConfig,
    "student": config.TrainingConfig,
    "collection": config.CollectionConfig,
}
SITE: dict[str, type] = {
    "": policy.SiteConfig,
    "server": policy.ServerFacts,
    "caps": policy.Caps,
    "allow": policy.AllowLists,
    "share": policy.Sharing,
    "dataset": DatasetSettings,
}
OF_A_DIRECTORY = {"server", "caps", "allow", "dataset", "share", "root", "holder"}
"""Fields of a site that are sections of their own, or no key of the file."""

HEAD = """# Configuration

Two files, both TOML, both validated: an unknown key, a missing one or a value outside its limits is refused with key,
value and limit. Written by `python -m tests.configuration_reference`.

## study.toml

`consilium study init` writes it; `schema = 1` and `name` stand at its top. `[data]`, `[privacy]` and `[codec]` are what
a hospital consents to: changing one makes another study. The rest changes no guarantee.
"""
OF_A_SITE = """
## site.toml

`consilium site init` writes it. It is the hospital's policy, and no message from the server changes it. `schema = 1`
stands at its top, `[labels]`, `[channels]` and `[bids.CONTRAST]` map the dataset's own names ([data](data.md)).
"""


def reference() -> str:
    """The whole document."""
    study = "".join(section(name, kind) for name, kind in STUDY.items())
    return HEAD + study + OF_A_SITE + "".join(section(name, kind) for name, kind in SITE.items())


def keys(name: str, kind: type) -> list[dataclasses.Field]:
    """The keys that a section takes."""
    hidden = OF_A_DIRECTORY if not name else {"labels", "channels", "choice"} if name == "dataset" else set()
    return [each for each in dataclasses.fields(kind) if each.init and each.name not in hidden]


def section(name: str, kind: type) -> str:
    text = " ".join(inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].split())
    rest = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[1:]
    text = "\n\n".join([text, *(" ".join(each.split()) for each in rest)])
    text = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", text).replace("``", "`")
    rows = "".join(
        f"| `{each.name}` | {type_of(each)} | {default_of(each, student=name == 'student')} |\n"
        for each in keys(name, kind)
    )
    title = f"\n### [{name}]\n\n" if name else "\n### at the top\n\n"
    return f"{title}{text}\n\n| key | type | default |\n|---|---|---|\n{rows}"


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
