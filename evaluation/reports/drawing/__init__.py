"""Plots of a run, and the parts that they are made of."""
