"""Registers codecs and query protocols by name: a protocol's classes for site and server, and what it requires.

The registry is plain data. Other modules check studies, fit codecs and recommend plans by a protocol's requirements;
none compares a protocol's name. Refuses a name that is not registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from common.errors import InvalidInput

CODECS: Mapping[str, str] = MappingProxyType(
    {
        "pca": "common.codecs.pca:PcaCodec",
        "ball-ae": "common.codecs.ball_autoencoder:BallAutoencoder",
        "paper-pca": "common.codecs.paper:PaperPcaCodec",
    }
)
"""Every codec as ``module:class``, by its name in a study (``codec.name``). A class is imported on first use, because
``ball-ae`` needs torch.
"""

PLAIN = "per-volume"
"""Protocol of a study whose file names no protocol."""

MAX_JOINT_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class GainFactors:
    """Facts by which the planner predicts the gain of a protocol whose queries cover all public volumes.

    They were measured on the tasks in docs/utility.md.

    Attributes:
        query: Name of a query in a plan's sentence, such as "a joint query".
        knowledge: What the answers carry, as a part of the same sentence.
        placed: True if the protocol suits tasks whose structures overlap in the public label maps; False if it suits
            the other tasks.
        fitted: True if the planner's formula for the gain was fitted to measurements with this protocol.
        rehearsal: ``module:function`` that makes the public start, and the student without any hospital's answers.
        spectrum: Share of each direction in the variance of the teachers' answers. If it is empty, the planner uses the
            spectrum of a tangent kernel.
    """

    query: str
    knowledge: str
    placed: bool
    fitted: bool
    rehearsal: str
    spectrum: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ProtocolTerms:
    """A protocol's classes and requirements. A field at its default value requires and limits nothing.

    Attributes:
        site: ``module:class`` that a site runs, imported on first use.
        server: ``module:class`` that the server runs. A site never imports it.
        line: Line that chooses the protocol in a study's file, if it is not ``codec.protocol = NAME``.
        codecs: Codecs that it can use; empty for all.
        framed: True if a query covers all public volumes and its codes are relative to a frame. Planned queries are
            then rounds, and the variances of a code's coordinates are proportional to those of the public shapes.
        most_rounds: Most rounds that may be planned.
        pairs: True if public start, student and controls may be trained on public volumes with label maps.
        finer: True if the student may be trained on a finer grid.
        one_public: True if the controls ``zero_code`` and ``public_only`` are one network, unless public volumes with
            label maps exist.
        teacher: Settings of the teachers' recipe that differ from the default; they were found best in measurements.
        student: Settings of the student's recipe that differ from the default.
        scattered: Further settings of the student's recipe for tasks whose structures do not overlap in the public
            label maps.
        prospects: The planner's facts about the protocol; None if the planner cannot recommend it.
    """

    site: str
    server: str
    line: str = ""
    codecs: tuple[str, ...] = ()
    framed: bool = False
    most_rounds: int | None = None
    pairs: bool = False
    finer: bool = False
    one_public: bool = False
    teacher: Mapping[str, Any] = field(default_factory=dict)
    student: Mapping[str, Any] = field(default_factory=dict)
    scattered: Mapping[str, Any] = field(default_factory=dict)
    prospects: GainFactors | None = None


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
            student={"steps": 1200, "augmentation": "wider"},
            scattered={"steps": 400, "augmentation": "wide-mirror"},
            prospects=GainFactors(
                query="an appearance query",
                knowledge="what structures look like",
                placed=False,
                fitted=False,
                rehearsal="server.protocols.appearance.rehearsed:begin",
                spectrum=(0.318,) * 3 + (0.015,) * 3,  # three means, three standard deviations, before any query
            ),
        ),
        "joint": ProtocolTerms(
            "common.protocols.joint:JointSite",
            "server.protocols.joint.protocol:Joint",
            line="codec.joint = true",
            codecs=("pca",),
            framed=True,
            most_rounds=MAX_JOINT_ROUNDS,
            pairs=True,
            finer=True,
            one_public=True,
            teacher={"steps": 150, "learning_rate": 5e-3},
            student={"steps": 1200},
            prospects=GainFactors(
                query="a joint query",
                knowledge="what teachers know beyond public data",
                placed=True,
                fitted=True,
                rehearsal="server.protocols.joint.rehearsed:begin",
            ),
        ),
    }
)
"""Every protocol by its name."""


class HasProtocol(Protocol):
    """Interface of a codec section: its two keys ``joint`` and ``protocol``, which choose the query protocol."""

    @property
    def joint(self) -> bool: ...
    @property
    def protocol(self) -> str: ...


def protocol_name(codec: HasProtocol) -> str:
    """Return the name of the protocol that a codec section chooses.

    Args:
        codec: The section. ``joint = true`` chooses the joint protocol since version 0.1.0; later protocols are chosen
            by ``protocol``.

    Returns:
        Key of :data:`PROTOCOLS`.

    Raises:
        InvalidInput: If ``joint`` and ``protocol`` are both set.
    """
    if codec.joint and codec.protocol:
        raise InvalidInput(
            "codec.protocol",
            value=codec.protocol,
            limit=f"no protocol in a file that also has {choosing_line('joint')}",
            remedy="remove one of the two lines",
        )
    return codec.protocol or ("joint" if codec.joint else PLAIN)


def keys_of(name: str) -> dict[str, Any]:
    """Return the keys and values of a codec section that choose a protocol.

    Args:
        name: Key of :data:`PROTOCOLS`.

    Returns:
        ``joint`` and ``protocol``.

    >>> keys_of("appearance")
    {'joint': False, 'protocol': 'appearance'}
    """
    return {"joint": name == "joint", "protocol": "" if name in (PLAIN, "joint") else name}


OLD_KEY = "joint"
"""Key by which version 0.1.0 chose the protocol. It is in every study's consent text."""


def framed_in(codec: Mapping[str, Any]) -> bool:
    """Return whether a query covers all public volumes at once, by a study's stored codec section.

    Args:
        codec: The section as stored in a consent text.

    Returns:
        True if it does; False for an unknown protocol.
    """
    terms = PROTOCOLS.get(codec.get("protocol") or ("joint" if codec.get(OLD_KEY) is True else PLAIN))
    return terms is not None and terms.framed


def terms_of(name: str) -> ProtocolTerms:
    """Return a protocol's classes and requirements.

    Args:
        name: Key of :data:`PROTOCOLS`.

    Returns:
        Its terms.

    Raises:
        InvalidInput: If the name is not registered.

    >>> terms_of("joint").codecs
    ('pca',)
    """
    if name not in PROTOCOLS:
        raise InvalidInput("codec.protocol", value=name, limit=", ".join(sorted(PROTOCOLS)))
    return PROTOCOLS[name]


def choosing_line(name: str) -> str:
    """Return the line that chooses a protocol in a study's file.

    Args:
        name: Key of :data:`PROTOCOLS`.

    Returns:
        A line of TOML.

    >>> choosing_line("appearance")
    'codec.protocol = "appearance"'
    """
    return terms_of(name).line or f'codec.protocol = "{name}"'


def choosing_lines(need: str) -> str:
    """Return the lines that choose a protocol with a given capability in a study's file.

    Args:
        need: Name of the field of :class:`ProtocolTerms` that must be true, such as ``pairs``.

    Returns:
        Lines of TOML joined by "or".
    """
    return " or ".join(choosing_line(name) for name, terms in PROTOCOLS.items() if getattr(terms, need))


def suited(*, placed: bool) -> str:
    """Return the name of the protocol that suits a task, among the protocols whose queries cover all public volumes.

    Args:
        placed: True if the task's structures overlap in the public label maps: the maps' mean Dice with their average
            is at least .4 (docs/utility.md).

    Returns:
        Key of :data:`PROTOCOLS`.

    >>> suited(placed=True), suited(placed=False)
    ('joint', 'appearance')
    """
    return next(name for name, terms in PROTOCOLS.items() if terms.prospects and terms.prospects.placed is placed)
