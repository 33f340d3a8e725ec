"""HTTP itself: request bodies, error responses, event feeds, a line for each request."""
