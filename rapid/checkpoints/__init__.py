"""Readers of a checkpoint's files that need no torch: facts, memory, vocabulary, text."""
