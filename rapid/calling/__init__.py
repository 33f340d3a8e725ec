"""Tools that an answer may call: how models are told of them, and how their calls are read."""
