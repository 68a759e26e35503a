"""What `make test` runs here is what comes with the development environment."""

# Clients with an environment of their own: `make test-clients`.
collect_ignore = ["apart"]
