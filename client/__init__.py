"""The hospital's side: teachers, the worker that answers queries, and the site's own policy and ledger."""
