"""Placement, leasing, routing and failure handling of replicas on a Ray cluster."""
