"""The tokens of `rapid.speculation.acceptance` and `rapid.speculation.sampling`, in less time."""
