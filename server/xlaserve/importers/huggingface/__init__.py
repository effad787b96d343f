"""Language models out of the directories that Hugging Face's transformers writes."""
