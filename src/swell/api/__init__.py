"""The HTTP API and the client SDK."""
