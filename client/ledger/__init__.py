"""Holds the site's own ledger: every acceptance, code, receipt, training and decision, as signed rows in one file."""
