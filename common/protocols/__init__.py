"""The sites' half of the query protocols: which code a site computes for a query."""
