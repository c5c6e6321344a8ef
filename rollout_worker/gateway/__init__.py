"""The gateway: environments that live in other programs, which connect by WebSocket (docs/guides/gateway.md)."""
