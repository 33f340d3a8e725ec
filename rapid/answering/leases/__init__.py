"""A request's leases on engines: the pools, the calls on a lease, and what drafts."""
