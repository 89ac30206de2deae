"""Defines the ``[start]`` section of a study: the network that its teachers, its student and its controls begin from.

The consortium supplies the weights. Refuses a text that is not a SHA-256, and a name without weights.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from common.canonical import check_hash
from common.errors import InvalidInput
from common.sections import check_types

MAX_NAME = 80


@dataclass(frozen=True, slots=True)
class StartConfig:
    """The network that the study's teachers, student and controls begin from, if the consortium supplies one.

    It is identified by the hash of its weights. Hospitals see all fields on the consent sheet.

    Attributes:
        weights: SHA-256 of the weights' file in hex; empty without such a network.
        name: The consortium's name for the network.
        study: Id of the study whose student the network is; empty for any other network.
    """

    weights: str = ""
    name: str = ""
    study: str = ""

    def __post_init__(self) -> None:
        check_types(self, where="start")
        for value in filter(None, (self.weights, self.study)):
            check_hash(value)
        if not self.weights and (self.name or self.study):
            raise InvalidInput("start.weights is missing", remedy="give the SHA-256 of the network's weights")
        if len(self.name) > MAX_NAME or not self.name.isprintable():
            raise InvalidInput(
                "start.name", value=self.name[:MAX_NAME], limit=f"at most {MAX_NAME} printable characters"
            )

    def to_table(self) -> dict[str, str]:
        """Return the section's keys and values, without keys whose value is empty."""
        return {key: value for key, value in asdict(self).items() if value}
