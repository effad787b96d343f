"""Open-loop benchmark of token generation: requests arrive even if the server is overloaded."""
