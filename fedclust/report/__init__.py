"""The report room: run directories, what a run writes into them, progress, tables and predictions."""
