"""The server's half of the query protocols: makes queries, turns answers into labels, and trains the student."""
