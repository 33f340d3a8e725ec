"""Files and vector stores of tenants: what they uploaded, what became of it, and who may see it."""
