"""What two processes must agree on: formats, protocol, configuration and policies."""
