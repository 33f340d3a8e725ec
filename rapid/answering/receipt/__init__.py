"""What is told of a complete answer: its receipt, citations and explanations."""
