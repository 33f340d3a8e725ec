"""The Kubernetes manifests of an application."""
