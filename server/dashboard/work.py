"""Runs one slow task of the dashboard in a process of its own: ``python -m server.dashboard.work TASK ARGUMENTS``.

The task ``verify LEDGER`` prints the report of a full verification. The task ``pictures STUDY OUT`` writes volumes,
labels and the student's predictions as small arrays for the slice viewer. It reads the study and writes only below OUT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from common.errors import ConsiliumError, InvalidInput
from server.dashboard.jobs import lower_priority


def main(arguments: list[str]) -> None:
    """Do the task that the first argument names, and print its result as JSON.

    Args:
        arguments: Name of the task, then its arguments.

    Raises:
        InvalidInput: For unknown arguments.
    """
    lower_priority()
    match arguments:
        case ["verify", ledger]:
            from server.ledger.verify import verify

            print(json.dumps(verify(Path(ledger)).to_json()))
        case ["pictures", study, out]:
            from server.dashboard.pictures import make_pictures
            from server.study.workspace import Workspace

            print(json.dumps({"made": make_pictures(Workspace(Path(study)), Path(out))}))
        case _:
            raise InvalidInput(
                "arguments of server.dashboard.work", value=arguments, limit="verify LEDGER, or pictures STUDY OUT"
            )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConsiliumError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
