"""The operator's dashboard: a process of its own that reads a study's directory and cannot spend budget.

It opens the ledger for reading only, holds none of the study's keys, and stores decisions (which labels to leave out)
in an append-only file of its own. Everything that it shows is a release, post-processing of a release, or public.
"""
