"""The console in a real browser: `python -m tests.console`."""
