"""Load tests: locust traffic through the router, measured, counted and reported (`make validate`)."""
