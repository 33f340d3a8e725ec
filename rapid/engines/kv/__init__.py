"""KV storage: pages, the leases that hold them, and the prefix cache."""
