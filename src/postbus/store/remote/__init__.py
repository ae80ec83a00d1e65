"""The store at the other end of HTTP: a postbus server, asked by publishers, workers and operators elsewhere."""
