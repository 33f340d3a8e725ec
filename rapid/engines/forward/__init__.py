"""One forward of a loaded model over a ragged batch."""
