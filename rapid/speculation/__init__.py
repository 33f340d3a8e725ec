"""The speculation method: distributions, acceptance, noise and the loop (``docs/algorithm.md``)."""
