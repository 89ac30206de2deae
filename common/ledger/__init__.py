"""The privacy ledgers: what was spent and released at the server, and each hospital's own record of the same."""
