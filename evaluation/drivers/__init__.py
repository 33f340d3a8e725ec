"""What answers items: engines in this process, a server by HTTP."""
