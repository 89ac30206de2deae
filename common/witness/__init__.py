"""Witnesses of ledgers: other parties countersign a ledger's heads (signed hashes of its newest row).

A witness countersigns a newer head only after a proof that it covers all rows of the head that the witness knows.
"""
