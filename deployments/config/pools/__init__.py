"""Settings of pools: of models, of retrievers, of orchestrators and of the library."""
