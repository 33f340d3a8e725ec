"""Prompts of target and drafter: chats with whole documents, or with retrieved passages."""
