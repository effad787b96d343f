"""Model configurations: their file formats, fields, and meaning."""
