"""One model over several processes: how they meet, and what each has of it."""
