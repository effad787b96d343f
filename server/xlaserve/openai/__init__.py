"""OpenAI-compatible endpoints for models, completions, chat, responses and embeddings."""
