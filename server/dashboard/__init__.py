"""The operator's dashboard: a process of its own that reads a study's directory and cannot spend.

It opens the ledger for reading only, holds none of the study's keys, and keeps what is decided in it (which labels to
drop) in an append-only store of its own. Everything shown is a release, post-processing of one, or public.
"""
