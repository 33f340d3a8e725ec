"""Responses and conversations of tenants, kept or running, and what they have of files."""
