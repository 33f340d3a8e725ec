"""Measurements, run as `python -m benchmarks.ROOM.NAME` so that they can import each other."""
