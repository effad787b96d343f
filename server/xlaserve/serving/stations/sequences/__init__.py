"""The station of stateful models: sequences of dependent requests."""
