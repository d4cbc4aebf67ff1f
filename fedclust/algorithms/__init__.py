"""Federated methods, server side, one file per method."""
