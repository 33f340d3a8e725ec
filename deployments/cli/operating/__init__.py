"""The commands of an operator: what runs, its logs, keys and nodes, and manifests."""
