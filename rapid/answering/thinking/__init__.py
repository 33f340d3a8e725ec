"""The thinking before an answer, told apart from its text."""
