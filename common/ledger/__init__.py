"""The privacy ledgers: what was spent and released at the server, and each hospital's own record of the same."""

from common.ledger.store import Candidate, Ledger, PoolDeclaration, RosterEntry

__all__ = ["Candidate", "Ledger", "PoolDeclaration", "RosterEntry"]
