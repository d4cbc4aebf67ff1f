"""The data room: sources, partitions, transforms per client, and the data module that puts them together."""
