"""Text processing for language models: tokenizers, chat templates, grammars, streamed text."""
