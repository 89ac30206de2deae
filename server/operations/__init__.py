"""Runs the server's daemons, the one port that sites reach, and the admission of sites."""
