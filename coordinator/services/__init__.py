"""The services that a run brings along: Redis, an S3 server and Ray, each restarted when it dies or hangs."""
