"""Witnesses of ledgers: other parties countersign a ledger's heads, after a proof that a newer head keeps all rows of
an older one.
"""
