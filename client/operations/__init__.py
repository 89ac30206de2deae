"""Contains what a hospital's staff run: daemons, the doctor's checks, and decisions about patients and studies."""
