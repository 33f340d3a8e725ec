"""Request handling from the chat to the receipt: modes, prompts, leases, rounds and text."""
