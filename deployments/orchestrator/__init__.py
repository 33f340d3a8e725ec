"""One request at a time between its prompts, its leases and its receipt, over Ray."""
