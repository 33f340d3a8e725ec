"""Evaluation of the quality, speed and cost of every mode and baseline (``rapid eval``)."""
