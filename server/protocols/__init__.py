"""The server's side of the query protocols: makes queries, turns answers into labels, and trains the student."""
