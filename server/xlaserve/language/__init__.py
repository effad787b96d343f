"""Text of language models: tokenizers, chat templates, and text that comes token by token."""
