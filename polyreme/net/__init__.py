"""gRPC, TLS, addresses and ports."""
