"""The papers' networks and tables, benchmarks of utility; nothing a server or a site needs."""
