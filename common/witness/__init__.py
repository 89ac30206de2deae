"""Witnesses of ledgers: heads that other parties countersign, and proofs that a newer head keeps all rows of an older
one.
"""
