"""What a request settles before it begins: its parameters, and whether they go together."""
