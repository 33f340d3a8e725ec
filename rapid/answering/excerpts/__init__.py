"""What of a long chat and its documents goes into a prompt, and what is searched for."""
