"""Plans of requests: the resolved parameters of each, and checks that they go together."""
