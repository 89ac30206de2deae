"""Holds the server's half of the query protocols: what is asked, how answers are read, how the student is trained."""
