"""Every query protocol by its name: where its two halves stand, and what it needs of a study's terms.

Plain data, so that a study's file is checked, a codec fitted and a plan recommended by what a protocol needs, and no
other module asks a protocol for its name. Refuses a name that is not registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from common.errors import InvalidInput

PLAIN = "per-volume"
"""The protocol of a study that names none."""

MAX_JOINT_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class Prospects:
    """What the planner knows of a protocol that asks in rounds, measured on the tasks in docs/lab/utility-measured.md.

    ``asked`` and ``told`` are words for the query and for what teachers say in it. ``placed``: it suits tasks whose
    public shapes share a place; else tasks whose shapes do not. ``fitted``: the planner's gain was fitted on it.
    ``spectrum``: shares of the variance of what teachers know, by direction; empty for a tangent kernel's.
    ``rehearsal``: ``module:function`` that makes the public start and the student that nobody's answers make.
    """

    asked: str
    told: str
    placed: bool
    fitted: bool
    rehearsal: str
    spectrum: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ProtocolTerms:
    """A protocol's halves and its needs. A field left out needs and limits nothing.

    ``site`` and ``server``: ``module:class`` of the two halves, imported on use; a site never imports the server's.
    ``said``: how a study's file asks for it, where that is not ``codec.protocol``. ``codecs``: the codecs whose codes
    it can ask for. ``framed``: a query is about all public volumes and its codes are relative to a frame, so planned
    queries are rounds, volumes are whole ones and a code's coordinates vary as the shapes do. ``most_rounds`` may be
    planned. ``pairs``: start, student and controls may learn from paired public cases. ``finer``: the student may be
    trained on a finer grid. ``teacher`` and ``student``: keys of the recipes that differ from the default, as they were
    measured.
    """

    site: str
    server: str
    said: str = ""
    codecs: tuple[str, ...] = ()
    framed: bool = False
    most_rounds: int | None = None
    pairs: bool = False
    finer: bool = False
    teacher: Mapping[str, Any] = field(default_factory=dict)
    student: Mapping[str, Any] = field(default_factory=dict)
    prospects: Prospects | None = None


PROTOCOLS: Mapping[str, ProtocolTerms] = MappingProxyType(
    {
        "per-volume": ProtocolTerms(
            "common.protocols.per_volume:PerVolumeSite", "server.protocols.per_volume:PerVolume"
        ),
        "appearance": ProtocolTerms(
            "common.protocols.appearance:AppearanceSite",
            "server.protocols.appearance.protocol:Appearance",
            framed=True,
            teacher={"steps": 100},
            student={"steps": 400},
            prospects=Prospects(
                asked="an appearance query",
                told="what structures look like",
                placed=False,
                fitted=False,
                rehearsal="server.protocols.appearance.rehearsed:begin",
                spectrum=(0.318,) * 3 + (0.015,) * 3,  # three means and three spreads before anybody is asked
            ),
        ),
        "joint": ProtocolTerms(
            "common.protocols.joint:JointSite",
            "server.protocols.joint.protocol:Joint",
            said="codec.joint = true",
            codecs=("pca",),
            framed=True,
            most_rounds=MAX_JOINT_ROUNDS,
            pairs=True,
            finer=True,
            teacher={"steps": 150, "learning_rate": 5e-3},
            prospects=Prospects(
                asked="a joint query",
                told="what teachers know beyond public data",
                placed=True,
                fitted=True,
                rehearsal="server.protocols.joint.rehearsed:begin",
            ),
        ),
    }
)
"""Every protocol by its name (:func:`protocol_name`)."""


class SaysProtocol(Protocol):
    """The two keys of a study's codec section that name its protocol."""

    @property
    def joint(self) -> bool: ...
    @property
    def protocol(self) -> str: ...


def protocol_name(codec: SaysProtocol) -> str:
    """The protocol that a codec section names: ``joint`` decides between the two that 0.1.0 knew."""
    if codec.joint and codec.protocol:
        raise InvalidInput("codec.protocol", value=codec.protocol, limit=f"no protocol beside {asked_by('joint')}")
    return codec.protocol or ("joint" if codec.joint else PLAIN)


def keys_of(name: str) -> dict[str, Any]:
    """The keys of a codec section that name this protocol."""
    return {"joint": name == "joint", "protocol": "" if name in (PLAIN, "joint") else name}


OLD_KEY = "joint"
"""The key of a codec section that 0.1.0 decided the protocol by; it stands in every study's consent text."""


def framed_in(codec: Mapping[str, Any]) -> bool:
    """Whether the protocol that a stored codec section names asks about all volumes at once; False for one unknown."""
    terms = PROTOCOLS.get(codec.get("protocol") or ("joint" if codec.get(OLD_KEY) is True else PLAIN))
    return terms is not None and terms.framed


def terms_of(name: str) -> ProtocolTerms:
    """The protocol of that name; InvalidInput for one that is not registered."""
    if name not in PROTOCOLS:
        raise InvalidInput("codec.protocol", value=name, limit=", ".join(sorted(PROTOCOLS)))
    return PROTOCOLS[name]


def asked_by(name: str) -> str:
    """How a study's file asks for this protocol."""
    return terms_of(name).said or f'codec.protocol = "{name}"'


def asked_by_one_that(need: str) -> str:
    """How a study's file asks for the protocols with this field of :class:`ProtocolTerms` set."""
    return " or ".join(asked_by(name) for name, terms in PROTOCOLS.items() if getattr(terms, need))


def suited(*, placed: bool) -> str:
    """The protocol in rounds for a task whose public shapes share a place, or for one whose shapes do not."""
    return next(name for name, terms in PROTOCOLS.items() if terms.prospects and terms.prospects.placed is placed)
