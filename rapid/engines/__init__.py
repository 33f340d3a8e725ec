"""Engines: models with their KV pages, leases and scheduling, independent of Ray."""
