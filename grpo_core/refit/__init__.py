"""Moving new weights into every engine of the pool, verified."""
