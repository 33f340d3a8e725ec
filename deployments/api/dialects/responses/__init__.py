"""OpenAI's responses as a dialect: what is kept of them, and what becomes of conversations."""
