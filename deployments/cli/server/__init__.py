"""The process of a server on this machine, and what is asked of servers."""
