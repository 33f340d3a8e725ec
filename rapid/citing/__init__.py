"""Evidence for an answer in the texts that it was made from."""
