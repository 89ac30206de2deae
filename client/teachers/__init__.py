"""Loads a site's teachers for prediction, and checks and evaluates the student the server returns."""
