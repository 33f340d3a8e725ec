"""rapid."""
