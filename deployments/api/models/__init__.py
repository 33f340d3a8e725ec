"""The routes about models that generate nothing: their names, tokens and vectors."""
