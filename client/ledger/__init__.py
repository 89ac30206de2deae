"""The site's own ledger."""
