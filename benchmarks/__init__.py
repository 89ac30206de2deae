"""Measures the product; each module is a script with its own command line, or a part of ``make bench``."""
