"""Leases on an engine: what each holds, who waits for one, and what it costs."""
