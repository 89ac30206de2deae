"""Holds the reports, log lines and ledgers that a hostile, careless or unlucky person could leave for the dashboard."""
