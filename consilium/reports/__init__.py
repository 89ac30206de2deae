"""Reports and certificates for people."""
