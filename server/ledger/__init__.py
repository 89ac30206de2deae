"""Holds the server's ledger, its verification, its backup and its recovery."""
