"""Models from elsewhere: whether they can be had, and fetching them."""
