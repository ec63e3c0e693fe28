"""Write a store: pending shards, sealing, publishing generations."""
