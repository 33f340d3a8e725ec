"""OpenAI's older dialect: raw prompts to requests, events to text completions."""
