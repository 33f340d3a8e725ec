"""Vectors of texts: what makes them, who is next, and what a score says."""
