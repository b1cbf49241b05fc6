"""Choices from measurements made in the running job."""
