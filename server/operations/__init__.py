"""The server's daemons and the one port that sites reach."""
