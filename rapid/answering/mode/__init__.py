"""The mode of a request: what decides on it, and why."""
