"""Models, their KV, and the leases on it; no Ray here."""
