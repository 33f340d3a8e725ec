"""Receipts of complete answers, with their citations and explained tokens."""
