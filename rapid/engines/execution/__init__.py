"""Execution of calls: the state shared with callers, scheduling, and the compute thread."""
