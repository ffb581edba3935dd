"""Token batches → vectors. The only room that knows torch."""
