"""Questions to a running server: one of them, or a conversation."""
