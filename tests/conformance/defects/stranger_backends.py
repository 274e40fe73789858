BACKENDS = []
try_backend = None
