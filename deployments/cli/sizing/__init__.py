"""The commands that choose sizes: a plan of memory and speed, and a configuration."""
