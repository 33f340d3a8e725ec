"""Drivers that answer items with engines in this process, or with a server over HTTP."""
