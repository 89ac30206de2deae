"""The consortium's ledger, its verification and its backup."""
