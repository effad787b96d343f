"""OpenAI's endpoints for language models: models, completions, chat completions and embeddings."""
