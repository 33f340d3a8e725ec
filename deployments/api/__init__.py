"""The HTTP API: OpenAI's wire format over a stream of events, with keys, limits and errors."""
