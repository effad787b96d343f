"""The V2 protocol over REST."""
