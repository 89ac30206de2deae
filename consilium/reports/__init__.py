"""Writes a study's reports, its privacy certificate, and documents to file."""
