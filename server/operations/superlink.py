"""SuperLink as Flower ships it, with the operators' secret asked of whoever calls its control routes, and a quota.

Flower 1.41 lets everybody who reaches its port list and register nodes and submit code. It has a place for account
authentication but brings none; this puts a shared secret there, which lies in a file that its owner alone can read.
Refuses to start without the secret. Account authentication is switched on first, so that a Flower in which that place
has moved ends with an error of its own and never serves open routes; readiness is measured from outside besides
(``daemons.guarded``). What a site may store, and how the database is shared, is :mod:`server.operations.storage`'s.
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
)
from common.errors import InvalidInput
from server.operations import storage

MIN_SECRET = 32
"""Characters of a secret, at least."""


class Operators:
    """Flower's ControlAuthnPlugin: takes a control request for the operator's if it carries the secret.

    There is one account, the one that Flower has without authentication, and no login.
    """

    def __init__(self, secret: str) -> None:
        if len(secret) < MIN_SECRET:
            raise InvalidInput("operators' secret", limit=f"{MIN_SECRET} characters at least")
        self._secret = secret.encode()

    def validate_tokens_in_metadata(
        self, metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[bool, AccountInfo | None]:
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


def main() -> None:
    """``python -m server.operations.superlink --operator-secret-file FILE …``: ``flower-superlink`` with the rest."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--operator-secret-file", type=Path, required=True)
    given, others = parser.parse_known_args()
    operators = partial(Operators, given.operator_secret_file.read_text(encoding="ascii").strip())
    operators()
    os.environ[AUTHENTICATION_SWITCH] = "1"
    storage.install()
    config_loader.get_control_authn_ee_plugins = lambda: {AuthnType.OIDC: operators}
    sys.argv = ["flower-superlink", *others]
    flower_superlink()


if __name__ == "__main__":
    main()
