"""What can keep a server from starting or from working well here: one list of checks."""
