"""Scores, intervals, tables and figures of kept results."""
