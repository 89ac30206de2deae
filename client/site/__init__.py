"""Sets up a site's directory, opens its pool's ledger, and exchanges public facts with server and other hospitals."""
