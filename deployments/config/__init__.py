"""The configuration file: its schema, its parsing and the checks before a start."""
