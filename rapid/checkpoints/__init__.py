"""What a checkpoint's files say, read without torch: facts, memory, vocabulary, text."""
