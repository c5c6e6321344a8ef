"""Agreements between processes: formats, protocol, configuration and policies."""
