"""Reads a study file that a person wrote, and fills in omitted settings as `consilium study init` does.

The commands that create a study call it. The file of an existing study is read by ``common.config``, where a missing
``privacy.aggregation`` means an open study. In a new study's file, a missing ``aggregation`` is added below the line
``[privacy]``; a file without this line is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from common.config import GateConfig, PoolConfig, Study, parse_study, usual_aggregation
from common.errors import InvalidInput
from common.reading import parse_toml
from common.study_mechanism import usual_pool_epsilon, usual_verdicts

_PRIVACY = re.compile(r"^[ \t]*\[[ \t]*privacy[ \t]*\][ \t]*(?:#.*)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class StudyDraft:
    """A study that was read from a study file, before it is created.

    Attributes:
        study: The study's terms, with the filled-in settings.
        filled_in: One sentence for each setting that the file left to the default.
    """

    study: Study
    filled_in: tuple[str, ...]


def parse_draft(text: str) -> StudyDraft:
    """Parse the text of a study file from which a study is to be created.

    Args:
        text: The TOML text.

    Returns:
        The study, and a sentence for each setting that was filled in.

    Raises:
        InvalidInput: With the key, its value and its limit, for the first mistake in the text.
    """
    document = parse_toml(text, what="study file", remedy="see `consilium study init` for a valid one")
    said: list[str] = []
    quorum = _table(document, "privacy").get("quorum")
    if "aggregation" not in _table(document, "privacy") and type(quorum) is int:
        usual = usual_aggregation(quorum)
        if not _PRIVACY.search(text):
            raise InvalidInput(
                "privacy.aggregation is missing",
                limit="a value stated in the study file",
                remedy=f'add aggregation = "{usual}" to the privacy settings of the file',
            )
        text = _PRIVACY.sub(lambda found: f'{found[0]}\naggregation = "{usual}"', text, count=1)
        said.append(f"aggregation: {usual}, as is usual for a quorum of {quorum}; the study file does not say")
    study = parse_study(text)
    study.data.check_new()  # as the ledger will, but before anything is written
    if "gate" not in document and study.privacy.sealed:
        verdicts = usual_verdicts(study.privacy.quorum, sealed=True)
        study = replace(study, gate=GateConfig(verdicts))
        said.append(
            f"verdicts that release the student: {verdicts}, a majority of the quorum; the study file does not say"
        )
    if "pool" not in document:
        study = replace(study, pool=PoolConfig(usual_pool_epsilon(study.privacy.accountant, study.privacy.budget)))
        said.append("each pool's lifetime budget is the usual one, printed above; the study file does not say")
    return StudyDraft(study, tuple(said))


def _table(document: Any, name: str) -> dict[str, Any]:
    found = document.get(name, {})
    return found if isinstance(found, dict) else {}
