"""The request router under the name that Serve is given.

Serve copies the class that it is given, with the variables of its module, into every process. All
of the router is therefore in its base class, which each process imports: with `CIRCUITS` copied
along, the router would not see which replicas this process's callers have found broken.
"""

from __future__ import annotations

from cluster.affinity import AffinityRouter


class CopiedRouter(AffinityRouter):
    """`cluster.affinity.AffinityRouter`, of which a copy has nothing of its own."""
