"""Real texts and the questions about them, which the task `real-text` asks."""
