"""Dialects: each parses bodies of one API to requests, and renders events as its answers."""
