"""Contains the hospital's side: training, the worker that answers queries, and the site's own policy and ledger."""
