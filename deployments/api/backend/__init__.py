"""The orchestrators behind the API: where they are, whether they live, and how answers continue."""
