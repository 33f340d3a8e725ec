"""Files, vector stores and responses of tenants: what became of them, and who may see them."""
