"""The routes of files and vector stores, as OpenAI's SDK calls them."""
