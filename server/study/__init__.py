"""Holds a study's directory: how it is created, its terms in words, and the files in it."""
