"""Replicas that own an engine, and the retriever."""
