"""What a hospital's staff do and run: daemons, doctor, decisions about patients."""
