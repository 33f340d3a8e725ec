"""Stores of chunks: of this process, in a folder, or shared on a Qdrant server."""
