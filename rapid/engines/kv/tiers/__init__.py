"""KV of prompts below the pool: in host memory, and in files on a disk."""
