"""The method: distributions, fusion, acceptance, noise, the loop (``docs/algorithm.md``)."""
