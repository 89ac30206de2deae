"""Holds what both ledgers share: rows in a signed chain, keys, receipts, and the guard against a rolled-back file."""
