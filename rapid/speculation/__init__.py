"""The speculation method: distributions, fusion, acceptance, noise and the decoding loop.

``docs/algorithm.md`` describes it.
"""
