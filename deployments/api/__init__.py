"""HTTP: OpenAI's wire format in, events out; keys, limits, errors."""
