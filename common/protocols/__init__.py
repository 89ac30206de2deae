"""Holds the sites' half of the query protocols: what a site computes for a query."""
