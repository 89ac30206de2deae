"""Training a site's teachers: patients dealt to voters once, each voter trained on its own part alone."""
