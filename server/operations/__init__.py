"""Starts the server's daemons, serves the one port that sites reach, and admits sites."""
