"""The schema of the app."""
