"""A model that several processes of one machine compute together (tensor parallelism)."""
