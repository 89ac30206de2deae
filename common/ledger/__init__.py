"""What both ledgers share: rows in a signed chain, keys, receipts, the guard against a rolled-back file."""
