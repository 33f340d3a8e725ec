"""The configuration file: its schema, how it is read, what is checked before a start."""
