"""KV: its pages, who holds them, and what is found again."""
