"""Files and vector stores of tenants: what is kept of them, found in them, and deleted."""
