"""Accounts of tenants: their keys, limits and usage, and a log of what was done to them."""
