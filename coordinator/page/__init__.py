"""Browser page and Prometheus endpoint: views of status, store and Redis."""
