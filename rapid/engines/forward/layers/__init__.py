"""The layers that all families of models share, and their small operations."""
