"""The storage of the library: its database with migrations, pages of rows, and blobs of bytes."""
