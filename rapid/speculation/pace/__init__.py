"""How much is drafted, and when the drafter reads anew."""
