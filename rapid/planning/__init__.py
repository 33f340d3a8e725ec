"""Memory and time on paper: what fits, and how fast it can be."""
