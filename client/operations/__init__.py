"""Holds what a hospital's staff run: daemons, doctor, decisions about patients."""
