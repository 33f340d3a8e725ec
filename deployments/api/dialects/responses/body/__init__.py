"""The body of ``POST /v1/responses``: its items, its tools, and the chat that it is."""
