"""Holds the core: it offers queries, stores answers, runs the stages, and reports progress."""
