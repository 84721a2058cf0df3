"""What placing a request costs the router."""
