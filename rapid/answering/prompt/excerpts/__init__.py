"""The parts of a long chat and its documents that go into a prompt, and those that are searched."""
