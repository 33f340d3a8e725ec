"""One request from its chat to its receipt: modes, prompts, leases, rounds, text."""
