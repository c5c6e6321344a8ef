"""Metrics of training: the rows (`update_metrics`), where they go (`recorder`), writers of files and trackers."""
