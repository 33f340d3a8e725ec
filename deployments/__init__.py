"""The Ray Serve application: its deployments, HTTP API, configuration and command line."""
