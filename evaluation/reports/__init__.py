"""Scores, intervals, tables and figures computed from kept results."""
