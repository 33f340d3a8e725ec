"""What decides whether a request may come in: keys, admission, shares of tenants, limits."""
