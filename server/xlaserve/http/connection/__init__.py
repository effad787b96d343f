"""HTTP/1.1 connections, from received bytes to responses."""
