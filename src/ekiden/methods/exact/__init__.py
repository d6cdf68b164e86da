"""The exact classifier of fixed features, from sums that clients hand on."""
