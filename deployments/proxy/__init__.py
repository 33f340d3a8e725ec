"""What stands in Serve's proxy, before any request reaches a replica."""
