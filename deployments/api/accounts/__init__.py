"""Accounts over HTTP: keys, limits and the audit log for administrators, usage for every tenant."""
