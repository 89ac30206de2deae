"""Reports, log lines and ledgers that somebody hostile, careless or unlucky leaves where the dashboard reads."""
