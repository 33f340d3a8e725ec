"""A model that several processes compute together, on one machine or more (tensor parallelism)."""
