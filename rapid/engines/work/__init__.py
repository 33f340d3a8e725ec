"""Calls in progress on an engine, as small state machines over sequences."""
