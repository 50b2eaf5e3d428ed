"""A Hub on loopback, and the tests that drive it with the real client."""
