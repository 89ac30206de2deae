"""Writes a study's reports, certificates and papers for people."""
