"""Clustering on arrays: pure functions that know nothing of clients and servers."""
