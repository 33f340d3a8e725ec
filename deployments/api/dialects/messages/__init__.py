"""Anthropic's messages as a dialect: blocks to a chat, events to blocks."""
