"""OpenAI's chat dialect: bodies to requests, events to responses."""
