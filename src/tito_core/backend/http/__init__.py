"""HTTP for backends: one request in flight, its retries, its connections, its stream and its errors."""
