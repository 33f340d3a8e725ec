"""The console: the page at ``/`` on which a person asks about documents, as static files."""
