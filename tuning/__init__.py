"""Optuna studies over federated runs."""
