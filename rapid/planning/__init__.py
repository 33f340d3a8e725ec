"""Estimates of memory and time from shapes and datasheets: what fits, and how fast it can be."""
