"""Host models of our own: small, trained in minutes, and made to be watched. They know nothing of probes."""
