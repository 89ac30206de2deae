"""Witnesses of ledgers: other parties countersign a ledger's heads (its newest rows, signed), after a proof that the
rows up to a newer head begin with all rows up to an older one.
"""
