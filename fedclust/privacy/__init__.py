"""Privacy: pure functions on tensors and modules."""
