"""Starts Flower's SuperLink with a shared secret for its control routes and a storage quota for each node.

In Flower 1.41, anyone who reaches SuperLink's port can list and register nodes and submit code. Flower offers a plug-in
point for account authentication but ships no plug-in. This program adds a plug-in that requires a secret, which is
stored in a file that only its owner (or the group of the daemons' folder) can read. Without the secret, the program
does not start.

Authentication is switched on before the plug-in is installed. If a later Flower moves the plug-in point, SuperLink
therefore ends with an error and never serves unprotected routes. In addition, ``daemons.guarded`` tests from outside
that an unauthenticated call is refused. The quota and the queue for the database are in
:mod:`server.operations.storage`.
"""

from __future__ import annotations

import argparse
import hmac
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from common.engine import (
    ACCESS_TOKEN_KEY,
    AUTHENTICATION_SWITCH,
    NOOP_ACCOUNT_NAME,
    NOOP_FLWR_AID,
    AccountInfo,
    AuthnType,
    config_loader,
    flower_superlink,
    sql_corestate,
)
from common.errors import InvalidInput
from server.operations import storage

MIN_SECRET = 32
"""Minimum length of the operators' secret, in characters."""


BEGIN_S = 150.0
"""Seconds in which a ServerApp that SuperExec has started must report to SuperLink."""


class Operators:
    """Flower's ControlAuthnPlugin that accepts a control request if it carries the operators' secret.

    There is one account, the one that Flower uses without authentication, and no login.

    Args:
        secret: The shared secret, at least :data:`MIN_SECRET` characters.

    Raises:
        InvalidInput: If the secret is shorter.
    """

    def __init__(self, secret: str) -> None:
        if len(secret) < MIN_SECRET:
            raise InvalidInput(
                "operators' secret",
                limit=f"at least {MIN_SECRET} characters",
                remedy="delete the file operator.secret; `consilium server up` then writes a new one",
            )
        self._secret = secret.encode()

    def validate_tokens_in_metadata(
        self, metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[bool, AccountInfo | None]:
        """Check whether a request carries the secret. The comparison takes constant time.

        Returns:
            True and Flower's only account if it does; otherwise False and None.
        """
        given = [value for name, value in metadata if name == ACCESS_TOKEN_KEY]
        if len(given) != 1:
            return False, None
        said = given[0].encode() if isinstance(given[0], str) else given[0]
        if not hmac.compare_digest(said, self._secret):
            return False, None
        return True, AccountInfo(flwr_aid=NOOP_FLWR_AID, account_name=NOOP_ACCOUNT_NAME)

    def get_login_details(self) -> None:
        return None

    def get_auth_tokens(self, device_code: str) -> None:
        return None

    def refresh_tokens(self, metadata: Sequence[tuple[str, str | bytes]]) -> tuple[None, None]:
        return None, None


def give_time_to_begin() -> None:
    """Let SuperLink wait :data:`BEGIN_S` seconds for the first report of a started ServerApp, where Flower waits 30.

    After that time SuperLink refuses the ServerApp and has another one started. On a busy machine a ServerApp loads its
    code for more than 30 s, so no run would ever begin. The time between later reports stays Flower's.
    """
    later_s = sql_corestate.HEARTBEAT_PATIENCE * sql_corestate.HEARTBEAT_DEFAULT_INTERVAL
    sql_corestate.HEARTBEAT_DEFAULT_INTERVAL, sql_corestate.HEARTBEAT_PATIENCE = BEGIN_S, later_s / BEGIN_S


def main() -> None:
    """Run ``flower-superlink`` behind the operators' secret: ``python -m server.operations.superlink``.

    ``--operator-secret-file FILE`` is read here; all other arguments go to ``flower-superlink``.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--operator-secret-file", type=Path, required=True)
    given, others = parser.parse_known_args()
    operators = partial(Operators, given.operator_secret_file.read_text(encoding="ascii").strip())
    operators()
    os.environ[AUTHENTICATION_SWITCH] = "1"
    storage.install()
    give_time_to_begin()
    config_loader.get_control_authn_ee_plugins = lambda: {AuthnType.OIDC: operators}
    sys.argv = ["flower-superlink", *others]
    flower_superlink()


if __name__ == "__main__":
    main()
