"""How public volumes are asked about: what a query looks like to a site, and what a site makes of it."""
