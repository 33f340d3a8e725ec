"""Where a library keeps what it has: tables with their migrations, lists of rows, and blobs."""
