"""Modules that read, write, make and split image data. None of them handles codes, budgets or network messages."""
