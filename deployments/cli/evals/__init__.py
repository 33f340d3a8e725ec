"""The command ``rapid eval``: its options, what it runs, and what it shows meanwhile."""
