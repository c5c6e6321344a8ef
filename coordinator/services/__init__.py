"""Embedded services of a run: Redis, an S3 server and Ray, each restarted when it dies or hangs."""
