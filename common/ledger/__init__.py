"""The parts that the server's and a site's ledger share: signed chains of rows, keys, receipts, and
rollback detection.
"""
