"""Asking what structures look like: a few numbers, from which public images and public shapes make a student."""
