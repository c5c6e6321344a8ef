"""The page of runs in a browser, and what Prometheus scrapes: views of what status, store and Redis tell."""
