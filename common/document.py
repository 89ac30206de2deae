"""Reads and writes frozen dataclasses as JSON, in a form that their annotations declare.

Base of ledger rows, messages and files. One declaration serves reading and writing, so the two cannot differ. A
:class:`Document` is read from a mapping with exactly its fields, each of exactly its type (a bool is no integer). In
JSON, a rational, a float and bytes are written as strings (by ``rational``, ``float.hex`` and base64), and a
``StrEnum`` member as its value. A tuple is written as a list, another document as a mapping. Marks in ``Annotated`` can
rename a field (:class:`Key`), bound the length of a list before its items are read (:class:`Count`), and check the
value. A field of type ``X | None`` is left out if it is None. Refuses unknown, missing and ill-typed fields.
"""

from __future__ import annotations

import base64
import dataclasses
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Self, Union, get_args, get_origin, get_type_hints

from common.canonical import (
    canonical_bytes,
    check_hash,
    check_schema,
    member,
    parse_canonical,
    parse_float,
    parse_rational,
    rational,
)
from common.errors import InvalidInput


class Document:
    """Base class of frozen dataclasses that are read from JSON and written to it."""

    __slots__ = ()

    AS_LIST: ClassVar[bool] = False
    """True if the JSON form is a list of the field values, which must be strings and integers."""

    SHARED: ClassVar[bool] = False
    """True if equal documents share one object, for documents that are read very often. All fields must be strings."""
    SCHEMA: ClassVar[tuple[str, int] | None] = None
    """Name of the document, and its version. The version is written under ``schema`` and checked before the fields."""
    STATED: ClassVar[Mapping[str, object]] = {}
    """Constant keys and values that every JSON form of the class contains."""

    def to_json(self) -> Any:
        """Return the document as values for JSON: a mapping or a list."""
        return _form(type(self)).write(self)

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Read the JSON form that :meth:`to_json` returned.

        Args:
            data: The parsed JSON.

        Returns:
            The document.

        Raises:
            InvalidInput: For anything else.
        """
        made: Self = _form(cls).read(data)
        return made

    def check(self) -> None:
        """Check rules that concern several fields; called after reading. It does nothing unless a subclass overrides
        it.

        Raises:
            InvalidInput: If a rule is broken.
        """


class StoredDocument(Document):
    """Base class of documents that are stored in a file of their own, as canonical bytes."""

    __slots__ = ()

    FILE: ClassVar[tuple[str, int] | None] = None
    """Name of the file in errors, and its largest size in bytes; None if the caller limits the size."""

    def render(self) -> bytes:
        """Return the bytes of the document's file."""
        return canonical_bytes(self.to_json())

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read the bytes that :meth:`render` returned. No signature is checked.

        Args:
            data: The file's bytes.

        Returns:
            The document.

        Raises:
            InvalidInput: If the file is too large or is not such a document.
        """
        if cls.FILE is not None and len(data) > cls.FILE[1]:
            what, most = cls.FILE
            raise InvalidInput(f"size of the {what}", value=f"{len(data)} bytes", limit=f"at most {most} bytes")
        return cls.from_json(parse_canonical(data))


@dataclass(frozen=True, slots=True)
class Key:
    """Mark for ``Annotated``: the field's key in JSON, if it differs from the name of the dataclass field."""

    name: str


@dataclass(frozen=True, slots=True)
class Count:
    """Mark for ``Annotated``: bounds on the length of a list, or on the number that ``of`` computes from the list.

    The bounds are checked before any item is read.
    """

    what: str
    least: int = 0
    most: int | None = None
    of: Callable[[list[Any]], int] = len

    def check(self, items: list[Any]) -> None:
        """Check the bounds on a list.

        Args:
            items: The items as JSON, not yet read.

        Raises:
            InvalidInput: If it is outside the bounds.
        """
        Between(self.what, self.least, self.most)(self.of(items))


@dataclass(frozen=True, slots=True)
class Between:
    """Mark for ``Annotated``: the least and the largest value of an integer."""

    what: str
    least: int
    most: int | None = None

    def __call__(self, value: int) -> None:
        if value < self.least or (self.most is not None and value > self.most):
            limit = f"{self.least} or more" if self.most is None else f"{self.least} to {self.most}"
            raise InvalidInput(self.what, value=value, limit=limit)


@dataclass(frozen=True, slots=True)
class OrEmpty:
    """Mark for ``Annotated``: the string is empty, or ``check`` accepts it."""

    check: Callable[[str], object]

    def __call__(self, value: str) -> None:
        if value:
            self.check(value)


@dataclass(frozen=True, slots=True)
class OneOf:
    """Mark for ``Annotated``: the string is one of ``words``."""

    what: str
    words: tuple[str, ...]

    def __call__(self, value: str) -> None:
        if value not in self.words:
            raise InvalidInput(self.what, limit=", ".join(self.words))


class _Mark:
    pass


FLAT = _Mark()
"""Mark for ``Annotated``: this document's fields are written directly into the mapping of the document around it."""
LATER = _Mark()
"""Mark for ``Annotated``: documents of earlier versions lack this field and are read with its default."""
AS_TEXT = _Mark()
"""Mark for ``Annotated``: the integer is written as a string of digits, because many JSON readers keep only 53 bits."""

Sha256 = Annotated[str, check_hash]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Describes how a type is read and written: its JSON type, and the functions that convert and check values."""

    json: type
    read: Callable[[Any], Any] | None = None
    write: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class _Field:
    key: str
    name: str
    kind: _Kind
    may_lack: bool
    flat: _Form | None


class _Form:
    """The plan by which a document class is read and written, derived from its annotations."""

    def __init__(self, cls: type[Any]) -> None:
        self.cls, self.as_list = cls, bool(cls.AS_LIST)
        self.stated = dict(cls.STATED) | ({} if cls.SCHEMA is None else {"schema": cls.SCHEMA[1]})
        hints = get_type_hints(cls, include_extras=True)
        fields = [_field(field, hints[field.name]) for field in dataclasses.fields(cls) if field.init]
        self.plain = [field for field in fields if field.flat is None]
        self.flat = [(field.name, field.flat) for field in fields if field.flat is not None]
        self.reads = [(field.key, field.name, field.kind.json, field.kind.read) for field in self.plain]
        self.json = [field.key for field in self.plain]
        self.writes = [(field.key, field.kind.write) for field in self.plain if field.kind.write is not None]
        self.optional: frozenset[str] = frozenset(field.key for field in self.plain if field.may_lack).union(
            *(form.optional for _, form in self.flat)
        )
        self.absent = [field.key for field in self.plain if field.may_lack and _optional(hints[field.name])]
        self.keys: frozenset[str] = frozenset(self.stated).union(
            (field.key for field in self.plain), *(form.keys for _, form in self.flat)
        )
        if self.as_list and (self.writes or self.flat):
            raise TypeError(f"{cls.__name__}: AS_LIST needs fields that are strings or integers")
        names = [field.name for field in self.plain]
        self.values: Callable[[Any], tuple[Any, ...]] = _values_of(names)
        self.check = None if cls.check is Document.check else cls.check
        self.make: Callable[..., Any] = lru_cache(maxsize=4096)(cls) if cls.SHARED else cls

    def write(self, value: Any) -> Any:
        if self.as_list:
            return list(self.values(value))
        made = dict(zip(self.json, self.values(value), strict=False))
        for key, write in self.writes:
            made[key] = write(made[key])
        if self.stated:
            made = self.stated | made
        for key in self.absent:
            if made[key] is None:
                del made[key]
        for name, form in self.flat:
            made |= form.write(getattr(value, name))
        return made

    def read(self, data: Any) -> Any:
        value = self.make(*self._listed(data)) if self.as_list else self.cls(**self._fields(data))
        if self.check is not None:
            self.check(value)
        return value

    def _fields(self, data: Any) -> dict[str, Any]:
        if type(data) is not dict:
            raise InvalidInput("type of a record", value=type(data).__name__, limit="a mapping")
        self._check_keys(data)
        made = {}
        for key, name, kind, read in self.reads:
            if key not in data:  # an optional field
                continue
            made[name] = _read(key, data[key], kind, read)
        for name, form in self.flat:
            made[name] = form.read({key: data[key] for key in form.keys if key in data})
        return made

    def _listed(self, data: Any) -> list[Any]:
        if type(data) is not list or len(data) != len(self.reads):
            raise InvalidInput(self.cls.__name__, limit=f"a list of {', '.join(self.json)}")
        return [_read(key, value, kind, read) for value, (key, _, kind, read) in zip(data, self.reads, strict=True)]

    def _check_keys(self, data: dict[str, Any]) -> None:
        if self.cls.SCHEMA is not None:
            what, known = self.cls.SCHEMA
            check_schema(what, data.get("schema"), known=known)
        if data.keys() != self.keys and (data.keys() - self.keys or self.keys - data.keys() - self.optional):
            wrong = sorted(map(str, data.keys() ^ self.keys - self.optional))
            raise InvalidInput("missing or unknown record keys", value=wrong, limit=f"exactly {sorted(self.keys)}")
        for key, stated in self.stated.items():
            if type(data[key]) is not type(stated) or data[key] != stated:
                raise InvalidInput(f"value of record key {key}", limit=str(stated))


def _form(cls: type[Document]) -> _Form:
    form = _FORMS.get(cls)
    if form is None:
        form = _FORMS[cls] = _Form(cls)
    return form


def _values_of(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple([getattr(value, name) for name in names])


def _optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType) and types.NoneType in get_args(hint)


def _field(field: dataclasses.Field[Any], hint: Any) -> _Field:
    _, marks = _bare(hint)
    key = next((mark.name for mark in marks if isinstance(mark, Key)), field.name)
    if _optional(hint):
        (hint,) = (one for one in get_args(hint) if one is not types.NoneType)
        kind = _kind(hint, key)
        write = kind.write and _unless_none(kind.write)
        return _Field(key, field.name, dataclasses.replace(kind, write=write), True, None)
    flat = _form(_bare(hint)[0]) if FLAT in marks else None
    return _Field(key, field.name, _Kind(dict) if flat else _kind(hint, key), LATER in marks, flat)


def _read(key: str, value: Any, kind: type, read: Callable[[Any], Any] | None) -> Any:
    if type(value) is not kind:
        raise InvalidInput(f"type of record key {key}", value=type(value).__name__, limit=kind.__name__)
    return value if read is None else read(value)


def _unless_none(write: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else write(value)


def _bare(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    if get_origin(hint) is Annotated:
        bare, *marks = get_args(hint)
        return bare, tuple(marks)
    return hint, ()


def _kind(hint: Any, what: str) -> _Kind:
    """Return the functions that read and write values of an annotated type. Errors call the field ``what``."""
    bare, marks = _bare(hint)
    kind = _DIGITS if AS_TEXT in marks else _bare_kind(bare, what)
    counts = [mark.check for mark in marks if isinstance(mark, Count)]
    checks = [mark for mark in marks if callable(mark)]
    if not counts and not checks:
        return kind
    read = kind.read

    def checked(value: Any) -> Any:
        for count in counts:
            count(value)
        if read is not None:
            value = read(value)
        for check in checks:
            check(value)
        return value

    return dataclasses.replace(kind, read=checked)


def _bare_kind(hint: Any, what: str) -> _Kind:
    origin, args = get_origin(hint), get_args(hint)
    if hint in _KINDS:
        return _KINDS[hint]
    if origin is tuple and args[-1] is ...:
        return _list(_kind(args[0], what), what)
    if origin is tuple:
        return _pair([_kind(arg, what) for arg in args], what)
    if origin is dict:
        return _KINDS[dict] if args[1] in (object, Any) else _mapping(_kind(args[0], what), _kind(args[1], what), what)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _Kind(str, lambda text: member(hint, text, what=what), str)
    if isinstance(hint, type) and issubclass(hint, Document):
        form = _form(hint)
        if hint.to_json is not Document.to_json:  # a document with several versions has its own conversion
            return _Kind(dict, hint.from_json, hint.to_json)
        return _Kind(list if form.as_list else dict, form.read, form.write)
    raise TypeError(f"{what}: no JSON form for {hint}")


def _item(kind: _Kind, what: str) -> Callable[[Any], Any]:
    json, read = kind.json, kind.read

    def item(value: Any) -> Any:
        if type(value) is not json:
            raise InvalidInput(f"type of an item of {what}", value=type(value).__name__, limit=json.__name__)
        return value if read is None else read(value)

    return item


def _list(kind: _Kind, what: str) -> _Kind:
    read, write = _item(kind, what), kind.write
    return _Kind(
        list,
        lambda items: tuple([read(item) for item in items]),
        list if write is None else lambda values: [write(value) for value in values],
    )


def _pair(kinds: list[_Kind], what: str) -> _Kind:
    reads = [_item(kind, what) for kind in kinds]
    writes = [kind.write or (lambda value: value) for kind in kinds]

    def read(items: list[Any]) -> tuple[Any, ...]:
        if len(items) != len(reads):
            raise InvalidInput(f"number of values in {what}", value=len(items), limit=f"exactly {len(reads)}")
        return tuple(read(item) for read, item in zip(reads, items, strict=True))

    return _Kind(list, read, lambda values: [write(value) for write, value in zip(writes, values, strict=True)])


def _mapping(keys: _Kind, values: _Kind, what: str) -> _Kind:
    key, read, write = _item(keys, what), _item(values, what), values.write or (lambda value: value)
    return _Kind(
        dict,
        lambda data: {key(name): read(value) for name, value in data.items()},
        lambda data: {name: write(value) for name, value in data.items()},
    )


def _parse_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:  # binascii.Error too
        raise InvalidInput("bytes in a record", limit="base64") from error


def _parse_digits(text: str) -> int:
    if not text.isdecimal() or len(text) > 20 or str(int(text)) != text:
        raise InvalidInput(
            "number in a record", value=text[:80], limit="a number from 0 in decimal digits, without leading zeros"
        )
    return int(text)


_DIGITS = _Kind(str, _parse_digits, str)
_FORMS: dict[type[Document], _Form] = {}
_KINDS: dict[Any, _Kind] = {
    str: _Kind(str),
    int: _Kind(int),
    bool: _Kind(bool),
    dict: _Kind(dict),
    Fraction: _Kind(str, parse_rational, rational),
    float: _Kind(str, parse_float, lambda value: float(value).hex()),
    bytes: _Kind(str, _parse_base64, lambda value: base64.b64encode(value).decode()),
}
