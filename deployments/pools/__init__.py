"""The pools' deployments: replicas that own an engine, and the retriever."""
