"""Files that people upload: read, kept and found again."""
